"use strict";
// Small makers of elements and texts; everything that comes from a document goes in as text.
const heddle = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  // What goes wrong is written into the page, where tests and people find it.
  const problems = [];
  function trouble(text) {
    problems.push(String(text));
    document.body.dataset.errors = problems.join(" | ");
    if (problems.length > 1 || !document.getElementById("main")) return;
    document.getElementById("main").prepend(el("p", { class: "error", role: "alert" },
      "Part of this page could not be drawn; was its document written by this version of heddle? ",
      problems[0]));
  }
  addEventListener("error", (event) => trouble(event.message));
  addEventListener("unhandledrejection", (event) => trouble(event.reason));
  addEventListener("securitypolicyviolation", (event) =>
    trouble(`${event.violatedDirective} keeps out ${event.blockedURI}`));

  function fill(node, facts, children) {
    for (const [name, value] of Object.entries(facts || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : String(value));
    }
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      node.append(child instanceof Node ? child : String(child));
    }
    return node;
  }
  const el = (name, facts, ...children) => fill(document.createElement(name), facts, children);
  const svg = (name, facts, ...children) =>
    fill(document.createElementNS(SVG, name), facts, children);

  const whole = (n) => Math.round(n).toLocaleString("en");
  const tenth = (n) => n.toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
  const percent = (share) => `${(100 * share).toFixed(1)}%`;
  function bytes(n) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let place = 0;
    for (; Math.abs(n) >= 1000 && place < 4; place++) n /= 1000;
    return (place === 0 || n >= 100 ? Math.round(n) : n.toPrecision(3)) + " " + units[place];
  }
  function seconds(s) {
    if (s === null || s === undefined) return "–";
    if (s === 0) return "0 s";
    if (s < 0.9995e-3) return (s * 1e6).toPrecision(3) + " µs";
    if (s < 0.9995) return (s * 1e3).toPrecision(3) + " ms";
    return (s < 100 ? s.toPrecision(3) : whole(s)) + " s";
  }
  const range = (pair, text) => pair.map((n) => (n === null ? "–" : text(n))).join(" to ");
  const degrees = (l) =>
    ["tp", "pcp", "dcp"].map((a) => `${a} ${l[a]}`)
      .concat(["pp", "dp"].filter((a) => l[a] > 1).map((a) => `${a} ${l[a]}`)).join(" ");

  // Cells are texts or elements; `{ n: text }` is a figure, set right.
  function table(caption, columns, rows, facts) {
    const cell = (kind, value) => {
      const isFigure = value !== null && typeof value === "object" && !(value instanceof Node);
      return el(kind, { class: isFigure ? "n" : null, scope: kind === "th" ? "col" : null },
        isFigure ? value.n : value);
    };
    const { tall, ...own } = facts || {};
    return el("div", { class: tall ? "scroll tall table" : "scroll table", tabindex: "0",
      role: "region", "aria-label": caption },
    el("table", own,
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, columns.map((c) => cell("th", c)))),
      el("tbody", {}, rows.map((r) => el("tr", { class: r.chosen ? "chosen" : null },
        (r.cells || r).map((c) => cell("td", c)))))));
  }
  const figure = (text) => ({ n: text });
  // Names beside values, as a panel shows them.
  const pairs = (facts) => el("table", {}, el("tbody", {}, facts.map(([name, value]) =>
    el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value)))));
  const cards = (facts) => facts.map(([name, value]) =>
    el("div", {}, el("p", {}, name), el("span", { class: "big" }, value)));
  function section(id, name, lead, ...children) {
    return el("section", { id, "aria-labelledby": `${id}-name` },
      el("h2", { id: `${id}-name` }, name), lead ? el("p", { class: "lead" }, lead) : null, children);
  }
  function choice(name, options, change, chosen) {
    const select = el("select", { onchange: () => change(select.value) },
      options.map(([value, text]) =>
        el("option", { value, selected: String(value) === String(chosen) }, text)));
    return el("label", {}, `${name} `, select);
  }
  const color = (n) => `g${((n % 8) + 8) % 8}`;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Drawings are as wide as their place: each is drawn once it has one, and again when that or the
  // theme changes.
  const drawings = new Map(), LEAST = 320, PADDING = 4;
  const room = (box) => Math.max(box.clientWidth - PADDING, LEAST);
  function fit(box, draw) {
    drawings.set(box, draw);
    if (box.isConnected) draw(room(box));
    return box;
  }
  function refit() {
    for (const [box, draw] of drawings) {
      if (!box.isConnected) drawings.delete(box);
      else draw(room(box));
    }
  }
  return { el, svg, whole, tenth, percent, bytes, seconds, range, degrees, table, figure, pairs,
    cards, section, choice, color, css, fit, refit };
})();
