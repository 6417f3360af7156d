// Compare: models or settings side by side on the same prompts.
import type { CompareState } from "../protocol.gen";
import { answersWidget } from "../shared/answerview";
import { CompareView } from "./view";
import "./compare.css";

export default () => answersWidget<CompareState>(CompareView, () => "");
