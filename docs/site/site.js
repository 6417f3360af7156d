// The site's own script: the loop plays when it is seen, live widgets follow the page's colours and take the height that they need.
(() => {
  const theme = () => (document.body.dataset.mdColorScheme === "slate" ? "dark" : "light");
  const frames = () => [...document.querySelectorAll("iframe.live")];
  const tell = (frame) => frame.contentWindow?.postMessage({ theme: theme() }, "*");

  addEventListener("message", ({ data, source }) => {
    const frame = frames().find((one) => one.contentWindow === source);
    if (!frame || typeof data?.height !== "number") return;
    frame.style.height = `${Math.min(4000, Math.max(80, data.height + 12))}px`;
    tell(frame);
  });

  const videos = [...document.querySelectorAll(".loop video")];
  const button = document.querySelector(".loop button");
  let wanted = !matchMedia("(prefers-reduced-motion: reduce)").matches;
  let visible = false;
  const play = () => {
    for (const video of videos) {
      const shown = video.classList.contains(theme());
      if (shown && visible && wanted) video.play().catch(() => {});
      else video.pause();
    }
    if (button) button.textContent = wanted ? "Pause" : "Play";
  };
  button?.addEventListener("click", () => {
    wanted = !wanted;
    play();
  });
  if (videos.length) {
    const seen = new IntersectionObserver((entries) => {
      visible = entries.some((entry) => entry.isIntersecting);
      play();
    });
    addEventListener("load", () => setTimeout(() => seen.observe(document.querySelector(".loop")), 300));
  }
  for (const frame of frames()) frame.addEventListener("load", () => tell(frame));
  new MutationObserver(() => {
    frames().forEach(tell);
    play();
  }).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });

  // What scrolls sideways can be reached with the keyboard.
  const boxes = ".md-typeset pre, .md-typeset pre > code, .md-typeset__scrollwrap, .md-typeset__table, .jp-OutputArea-output, .jp-OutputArea-output div";
  const reach = () => {
    for (const box of document.querySelectorAll(boxes)) {
      if (box.scrollWidth > box.clientWidth && getComputedStyle(box).overflowX !== "visible") box.tabIndex = 0;
    }
  };
  addEventListener("load", () => setTimeout(reach, 100)); // the theme wraps tables first
  addEventListener("resize", reach);
})();
