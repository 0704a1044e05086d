"use strict";
// One step, a lane per rank: parts of the work, and the collectives in them with their reasons.
heddle.timeline = (timeline) => {
  const { el, svg, color, seconds, whole, figure } = heddle;
  const LEFT = 200, LANE = 46, AT_ONCE = 8, MOST = 6000, MOST_ZOOM = 64, CHARACTER = 6.8;
  const PARTS = ["projection", "attention", "output", "MLP", "logits"];
  let step = 0, first = 0, zoom = 1, now = null, nodes = [];
  const box = el("div", { class: "scroll", role: "group", "aria-label": "lanes of ranks" });
  const panel = el("div", { class: "panel", role: "status", "aria-live": "polite", id: "span" });
  const below = el("div");
  const word = (n) => (n < 0 ? "" : timeline.words[n]);
  function hue(name, level) {
    if (level === 1) return name === "attend" ? color(1) : color(6);
    const place = PARTS.findIndex((known) => name.startsWith(known));
    return color(place < 0 ? 7 : place);
  }

  function tell(span, rank, node) {
    if (now) {
      now.classList.remove("now");
      now.setAttribute("tabindex", "-1");
    }
    now = node;
    node.classList.add("now");
    node.setAttribute("tabindex", "0");
    const [name, , start, length, layer, size, carries, reason] = span;
    const facts = [["rank", timeline.ranks[rank].label], ["from", seconds(start / 1e6)],
      ["takes", seconds(length / 1e6)]];
    if (layer >= 0) facts.push(["layer", layer]);
    if (size >= 0) facts.push(["receives", `${whole(size)} bytes`]);
    if (carries >= 0) facts.push(["carries", word(carries)]);
    if (reason >= 0) facts.push(["because", word(reason)]);
    panel.replaceChildren(el("h3", {}, name), heddle.pairs(facts));
  }
  // Arrows go along a lane and, up and down, to the span of the next lane at that time.
  function move(event, lane, place) {
    const own = nodes[lane];
    const beside = { ArrowRight: 1, ArrowLeft: -1, Home: -place, End: own.length - 1 - place };
    const across = { ArrowDown: 1, ArrowUp: -1 };
    let next = null;
    if (event.key in beside) next = own[place + beside[event.key]];
    if (event.key in across && nodes[lane + across[event.key]]) {
      const x = Number(own[place].getAttribute("x")), y = own[place].dataset.level;
      const others = nodes[lane + across[event.key]].filter((n) => n.dataset.level === y);
      next = others.find((n) => Number(n.getAttribute("x")) >= x - 0.01) || others[others.length - 1];
    }
    if (event.key === "+" || event.key === "=") scale(zoom * 2);
    if (event.key === "-") scale(zoom / 2);
    if (!next) return;
    event.preventDefault();
    next.focus();
  }
  function draw(space) {
    const found = timeline.steps[step];
    const lanes = found.lanes.slice(first, first + AT_ONCE);
    const end = Math.max(1e-9, ...lanes.flat().map((s) => s[2] + s[3]));
    const width = LEFT + (Math.max(space, 620) - LEFT) * zoom, height = lanes.length * LANE + 24;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group",
      "aria-label": `${found.name}, ${lanes.length} ranks; arrow keys go from span to span` });
    let count = 0;
    nodes = lanes.map((spans, lane) => {
      const y = lane * LANE, rank = first + lane;
      picture.append(svg("text", { x: 0, y: y + 18 }, timeline.ranks[rank].label));
      const own = [];
      for (const span of spans) {
        if (++count > MOST) break;
        const [name, level, start, length] = span;
        const x = LEFT + (start / end) * (width - LEFT);
        const w = Math.max((length / end) * (width - LEFT), 0.6);
        const place = own.length;
        const node = svg("rect", {
          x, y: y + (level ? 23 : 2), width: w, height: level ? 16 : 19, "data-level": level,
          class: `span ${hue(name, level)}`, tabindex: -1, role: "button",
          "aria-label": `${name}, ${seconds(length / 1e6)}, ${timeline.ranks[rank].label}`,
          onclick: () => tell(span, rank, node), onfocus: () => tell(span, rank, node),
          onmouseenter: () => tell(span, rank, node),
          onkeydown: (event) => move(event, lane, place),
        });
        own.push(node);
        picture.append(node);
        if (w > name.length * CHARACTER + 6) {
          picture.append(svg("text", { x: x + 3, y: y + (level ? 35 : 16), class: "on" }, name));
        }
      }
      return own;
    });
    const foot = lanes.length * LANE + 2;
    picture.append(svg("line", { class: "axis", x1: LEFT, x2: width, y1: foot, y2: foot }),
      svg("text", { x: LEFT, y: foot + 15 }, "0 s"),
      svg("text", { x: width, y: foot + 15, "text-anchor": "end" }, seconds(end / 1e6)));
    box.replaceChildren(picture);
    box.dataset.spans = String(Math.min(count, MOST));
    const start = nodes.flat()[0];
    if (start) start.setAttribute("tabindex", "0");
    now = start || null;
    panel.replaceChildren("Point at a span, or reach it with Tab and the arrow keys; + and - zoom.");
    below.replaceChildren(calls(found), facts(found));
  }
  function calls(found) {
    const rows = new Map();
    for (const [name, , , length, , size, carries, reason] of found.lanes[first]) {
      if (size < 0) continue;
      const key = `${name} ${carries} ${reason}`;
      const row = rows.get(key) || { name, carries, reason, calls: 0, bytes: 0, time: 0 };
      row.calls++;
      row.bytes += size;
      row.time += length;
      rows.set(key, row);
    }
    return heddle.table(`Collectives of ${timeline.ranks[first].label}, ${found.name}`,
      ["call", "carries", figure("calls"), figure("bytes received"), figure("time"), "because"],
      [...rows.values()].map((r) => [r.name, word(r.carries), figure(whole(r.calls)),
        figure(whole(r.bytes)), figure(seconds(r.time / 1e6)), word(r.reason)]), { id: "calls" });
  }
  function facts(found) {
    const shown = found.requests.slice(0, 12).map((r) =>
      `request ${r.request}: ${whole(r.rows)} ${r.rows === 1 ? "row" : "rows"} behind ` +
      `${whole(r.cached)} tokens`);
    if (found.requests.length > 12) shown.push(`${found.requests.length - 12} more requests`);
    return el("ul", { class: "notes" }, [...shown, ...found.reasons].map((t) => el("li", {}, t)));
  }
  const redraw = () => heddle.fit(box, draw);
  function scale(value) {
    zoom = Math.min(Math.max(value, 1), MOST_ZOOM);
    redraw();
  }
  redraw();
  const groups = Array.from({ length: Math.ceil(timeline.ranks.length / AT_ONCE) }, (_, i) => {
    const last = Math.min((i + 1) * AT_ONCE, timeline.ranks.length) - 1;
    return [i * AT_ONCE, `${timeline.ranks[i * AT_ONCE].rank} to ${timeline.ranks[last].rank}`];
  });
  const key = [...PARTS, "other"].map((name) =>
    el("span", { class: "key" }, el("i", { class: hue(name, 0) }), name));
  key.push(el("span", { class: "key" }, el("i", { class: hue("all_gather", 1) }), "collective"));
  return heddle.section("timeline", "One step",
    timeline.source === "model"
      ? "As the planner's model prices it. Calls and bytes are those that ranks are held to, seconds " +
        "are a model; one layer of each kind is drawn. The lower band of a rank is its collectives."
      : "As it was traced. The upper band of a rank is what it works at, the lower its collectives.",
    el("div", { class: "row" },
      heddle.choice("Step", timeline.steps.map((s, i) => [i, `${s.name} (${seconds(s.seconds)})`]),
        (v) => { step = Number(v); redraw(); }),
      groups.length > 1
        ? heddle.choice("Ranks", groups, (v) => { first = Number(v); redraw(); }) : null,
      el("button", { type: "button", onclick: () => scale(zoom * 2) }, "Zoom in"),
      el("button", { type: "button", onclick: () => scale(zoom / 2) }, "Zoom out")),
    el("p", {}, key), box, panel, below);
};
