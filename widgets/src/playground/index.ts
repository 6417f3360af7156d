// Playground: prompt, sampling controls, streamed text tinted by probability. One Feed per model, any number of views.
import type { AnyModel } from "@anywidget/types";
import type { Fates, PlaygroundState, TokenItem, Tops } from "../protocol.gen";
import { state } from "../shared/afm";
import { Feed, type FeedMessage } from "../shared/stream";
import { show } from "../shared/view";
import { fill, learn } from "./tops";
import { PlaygroundView } from "./view";
import "./playground.css";

export default () => {
  let feed: Feed<TokenItem> | undefined;

  function feedOf(model: AnyModel): Feed<TokenItem> {
    if (feed) return feed;
    const playground = state<PlaygroundState>(model);
    const made = new Feed<TokenItem>((message) => playground.send(message));
    made.seed(playground.get("_run_prompt"), playground.get("_tokens"), {
      n: playground.get("n_tokens"),
      tps: playground.get("tokens_per_second"),
      ttft_s: playground.get("ttft_s"),
    });
    feed = made;
    return made;
  }

  return {
    initialize({ model }: { model: AnyModel }) {
      const made = feedOf(model);
      const playground = state<PlaygroundState>(model);
      const undo = [
        playground.onMessage((message) => {
          made.receive(message as FeedMessage<TokenItem>);
          learn(made, message as Tops | Fates);
        }),
        playground.observe(["_tokens"], () => fill(made.items, playground.get("_tokens"))),
      ];
      model.send({ type: "ready" });
      return () => {
        for (const one of undo) one();
      };
    },
    render: (place: { model: AnyModel; el: HTMLElement }) =>
      show(new PlaygroundView(state<PlaygroundState>(place.model), feedOf(place.model)), place),
  };
};
