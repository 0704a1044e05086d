"use strict";
(() => {
  const { el } = heddle;
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = document.getElementById("main"), root = document.documentElement;
  document.getElementById("title").textContent = data.title;

  const button = document.getElementById("theme");
  const asked = new URLSearchParams(location.search).get("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  let isChosen = asked === "dark" || asked === "light";
  function theme(name) {
    root.dataset.theme = name;
    button.textContent = name === "dark" ? "Light theme" : "Dark theme";
    heddle.refit();
  }
  button.addEventListener("click", () => {
    isChosen = true;
    theme(root.dataset.theme === "dark" ? "light" : "dark");
  });
  system.addEventListener("change", () => { if (!isChosen) theme(system.matches ? "dark" : "light"); });
  theme(isChosen ? asked : system.matches ? "dark" : "light");

  heddle.contents = () => document.getElementById("nav").replaceChildren(
    ...[...document.querySelectorAll("section")].map((s) =>
      el("a", { href: `#${s.id}` }, s.querySelector("h2").textContent)));
  const place = el("div");
  function show(index) {
    const entry = data.layouts[index];
    place.replaceChildren(heddle.mesh(entry), heddle.ownership(entry),
      ...(entry.timeline ? [heddle.timeline(entry.timeline)] : []));
    heddle.refit();
  }
  if (data.plan) main.append(heddle.plan(data.plan));
  if (data.simulation) main.append(heddle.simulation(data.simulation));
  if (data.server) main.append(heddle.server(data.server));
  if (data.layouts.length > 1) {
    main.append(el("p", { class: "which" }, heddle.choice("Layout drawn below", data.layouts.map((l, i) =>
      [i, `${heddle.degrees(l.layout.layout)} ${l.name}`]), (v) => show(Number(v)))));
  }
  main.append(place);
  if (data.layouts.length) show(0);
  if (data.notes.length) {
    main.append(el("ul", { class: "notes", id: "notes" }, data.notes.map((n) => el("li", {}, n))));
  }
  if (data.source === "live") main.prepend(...heddle.live());
  heddle.contents();
  let wait = 0;
  addEventListener("resize", () => {
    clearTimeout(wait);
    wait = setTimeout(heddle.refit, 120);
  });
  heddle.refit();
  document.body.dataset.ready = String(Math.round(performance.now()));
})();
