// Compare: the same prompts through several models, bitrates or settings. One Feed per model, any number of views.
import type { AnyModel } from "@anywidget/types";
import type { CompareState, KlToken } from "../protocol.gen";
import { state } from "../shared/afm";
import { watchKernel } from "../shared/kernel";
import { Feed, type FeedMessage } from "../shared/stream";
import { CompareView } from "./view";
import "./compare.css";

export default () => {
  let feed: Feed<KlToken> | undefined;

  function feedOf(model: AnyModel): Feed<KlToken> {
    if (feed) return feed;
    const compare = state<CompareState>(model);
    const made = new Feed<KlToken>((message) => compare.send(message));
    made.seed("", compare.get("_tokens"), { n: compare.get("_tokens").length, tps: 0, ttft_s: null });
    feed = made;
    return made;
  }

  return {
    initialize({ model }: { model: AnyModel }) {
      const made = feedOf(model);
      const undo = state<CompareState>(model).onMessage((message) => made.receive(message as FeedMessage<KlToken>));
      model.send({ type: "ready" });
      return undo;
    },
    render({ model, el }: { model: AnyModel; el: HTMLElement }) {
      const view = new CompareView(state<CompareState>(model), feedOf(model));
      el.append(view.root);
      const undo = watchKernel(view.root, model);
      return () => {
        undo();
        view.close();
      };
    },
  };
};
