// CacheExplorer: one prompt under several cache modes, KL per token against FP16, sizes, and the needle. One Feed per model, any number of views.
import type { AnyModel } from "@anywidget/types";
import type { CachesState, KlToken } from "../protocol.gen";
import { state } from "../shared/afm";
import { watchKernel } from "../shared/kernel";
import { Feed, type FeedMessage } from "../shared/stream";
import { CachesView } from "./view";
import "./caches.css";

export default () => {
  let feed: Feed<KlToken> | undefined;

  function feedOf(model: AnyModel): Feed<KlToken> {
    if (feed) return feed;
    const caches = state<CachesState>(model);
    const made = new Feed<KlToken>((message) => caches.send(message));
    made.seed(caches.get("_run_prompt"), caches.get("_tokens"), { n: caches.get("_tokens").length, tps: 0, ttft_s: null });
    feed = made;
    return made;
  }

  return {
    initialize({ model }: { model: AnyModel }) {
      const made = feedOf(model);
      const undo = state<CachesState>(model).onMessage((message) => made.receive(message as FeedMessage<KlToken>));
      model.send({ type: "ready" });
      return undo;
    },
    render({ model, el }: { model: AnyModel; el: HTMLElement }) {
      const view = new CachesView(state<CachesState>(model), feedOf(model));
      el.append(view.root);
      const undo = watchKernel(view.root, model);
      return () => {
        undo();
        view.close();
      };
    },
  };
};
