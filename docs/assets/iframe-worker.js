// Search on a page that was opened as a file: there a browser starts no worker, so the theme's runs
// in a frame. The theme's worker asks for the name IFrameWorker, and for a promise of importScripts.
// docs/assemble.py writes the index that the theme then asks for. The theme's own plugin for this,
// `offline`, would take a file of another host, and the index of one language.
if (location.protocol === "file:") {
  const loaded = (page, src) => new Promise((resolve, reject) => {
    page.body.append(Object.assign(page.createElement("script"), { src, onload: resolve, onerror: reject }));
  });

  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html><title>search</title><body></body>";
      this.inside = new Promise((resolve, reject) => {
        frame.addEventListener("load", () => {
          const { contentWindow: inside, contentDocument: page } = frame;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          inside.importScripts = (...all) => all.reduce(
            (before, each) => before.then(() => loaded(page, each)), Promise.resolve());
          loaded(page, new URL(url, location.href).href).then(() => resolve(inside), reject);
        });
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
