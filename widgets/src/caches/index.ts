// CacheExplorer: one prompt under several cache modes, what each costs, and the needle test.
import type { CachesState } from "../protocol.gen";
import { answersWidget } from "../shared/answerview";
import { CachesView } from "./view";
import "./caches.css";

export default () => answersWidget<CachesState>(CachesView, (widget) => widget.get("_run_prompt"));
