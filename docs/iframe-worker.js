"use strict";
// A page that is opened from a file may not start a worker, so there the search runs in a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.answer = (data) => this.dispatchEvent(new MessageEvent("message", {data}));
      frame.srcdoc = `<script>postMessage = (data) => frameElement.answer(data)</script><script src="${new URL(url, location)}"></script>`;
      this.loaded = new Promise((done) => frame.addEventListener("load", () => done(frame.contentWindow)));
      document.body.append(frame);
    }

    postMessage(data) {
      this.loaded.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", {data})));
    }
  };
}
