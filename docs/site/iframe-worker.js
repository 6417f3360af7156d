// Pages from a folder (file:) may not start workers. There the search's worker runs in a hidden frame: same script, same messages.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "Search";
      frame.srcdoc = "<!doctype html><title>Search</title>";
      this.ready = new Promise((done) => {
        frame.addEventListener("load", async () => {
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          inside.importScripts = async (...urls) => {
            for (const each of urls) await this.load(inside, each);
          };
          await this.load(inside, url);
          done(inside);
        });
      });
      const place = () => document.body.append(frame);
      if (document.body) place();
      else addEventListener("DOMContentLoaded", place);
    }

    load(inside, url) {
      return new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        script.src = new URL(url, document.baseURI).href;
        script.onload = done;
        script.onerror = failed;
        inside.document.head.append(script);
      });
    }

    async postMessage(data) {
      const inside = await this.ready;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }
  };
}
