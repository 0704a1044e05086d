"use strict";
// Who computes which row of a prompt, and who stores which token. The document lists one period of
// ownership; it is repeated here, and nothing about it is decided here.
heddle.ownership = (entry) => {
  const { el, svg, color, whole } = heddle;
  const LANES = 32, LANE = 20, LEFT = 132, CHARACTER = 7;
  const { layout, places } = entry;
  let which = 0, token = 0;
  const answer = el("p", { class: "panel", role: "status", "aria-live": "polite", id: "owner" });
  const drawing = el("div", { class: "scroll" });
  const sequence = () => layout.kv.sequences[which];
  // Rows are the same on all TP ranks, so the first rank of each PCP place stands for them.
  const firsts = Array.from({ length: layout.layout.pcp }, (_, n) =>
    places.findIndex((at) => at.pcp === n));
  const segments = (n) => layout.rows[firsts[n]].segments.filter((p) => p.request === which);

  // Lanes of boxes over a stretch of positions; of many lanes those around `middle`.
  function band(id, title, names, boxes, low, high, middle, space) {
    const skipped = Math.min(Math.max(middle - LANES / 2, 0), Math.max(names.length - LANES, 0));
    const shown = names.slice(skipped, skipped + LANES);
    const scale = (space - LEFT) / Math.max(high - low, 1);
    const height = shown.length * LANE + 24;
    const picture = svg("svg", { id, viewBox: `0 0 ${space} ${height}`, width: space, height,
      role: "img", "aria-label": title });
    shown.forEach((name, i) => picture.append(svg("text", { x: 0, y: i * LANE + 14 }, name)));
    const foot = shown.length * LANE + 4;
    if (token >= low && token < high) {
      const x = LEFT + (token + 0.5 - low) * scale;
      picture.append(svg("line", { class: "mark token", x1: x, x2: x, y1: 0, y2: foot }));
    }
    for (const box of boxes) {
      const start = Math.max(box.start, low), end = Math.min(box.end, high);
      const lane = box.lane - skipped;
      if (lane < 0 || lane >= LANES || end <= start) continue;
      const x = LEFT + (start - low) * scale, width = Math.max((end - start) * scale, 0.6);
      picture.append(svg("rect", { x, y: lane * LANE + 2, width, height: LANE - 4,
        class: `box ${color(box.lane)}${token >= start && token < end ? " now" : ""}` },
      svg("title", {}, `${names[box.lane]}: ${box.start} to ${box.end - 1}`)));
      const label = box.end - box.start === 1 ? `${box.start}` : `${box.start}–${box.end - 1}`;
      if (width > label.length * CHARACTER + 4) {
        picture.append(svg("text", { x: x + 3, y: lane * LANE + 14, class: "on" }, label));
      }
    }
    picture.append(svg("line", { class: "axis", x1: LEFT, x2: space, y1: foot, y2: foot }),
      svg("text", { x: LEFT, y: foot + 15 }, whole(low)),
      svg("text", { x: space, y: foot + 15, "text-anchor": "end" }, whole(Math.max(high - 1, low))));
    const rest = names.length - shown.length;
    return [el("h3", {}, title), picture, rest > 0 ? el("p", { class: "notes" },
      `Of ${names.length} lanes, ${LANES} around the chosen token are drawn.`) : null];
  }
  function computed(space) {
    const boxes = firsts.flatMap((_, n) =>
      segments(n).map((p) => ({ lane: n, start: p.start, end: p.end })));
    const own = boxes.find((box) => token >= box.start && token < box.end);
    return band("rows", "Who computes which row of the prompt", firsts.map((_, n) => `pcp ${n}`),
      boxes, 0, sequence().seq_len, own ? own.lane : 0, space);
  }
  function stored(space) {
    const s = sequence();
    const window = Math.min(s.seq_len, Math.max(s.period * 2, 64));
    const low = Math.min(Math.max(token - 8, 0), Math.max(s.seq_len - window, 0));
    const high = low + window, boxes = [];
    for (let base = Math.floor(low / s.period) * s.period; base < high; base += s.period) {
      for (const run of s.runs) {
        const end = Math.min(base + run.end, s.seq_len);
        if (base + run.start < end) boxes.push({ lane: run.owner, start: base + run.start, end });
      }
    }
    const names = s.local_lens.map((n, i) => `place ${i}: ${whole(n)}`);
    return band("tokens", s.local_lens.length === 1
      ? `Who stores which token: each rank all ${whole(s.seq_len)} of them`
      : `Who stores which token: tokens ${whole(low)} to ${whole(high - 1)} of ` +
        `${whole(s.seq_len)}, by place in a DCP group`,
    names, boxes, low, high, ownerOf(s).owner, space);
  }
  const ownerOf = (s) => {
    const within = token % s.period;
    return s.runs.find((r) => within >= r.start && within < r.end) || { owner: 0, start: 0 };
  };
  function draw(space) {
    const wide = Math.max(space, 620);
    drawing.replaceChildren(...[computed(wide), stored(wide)].flat().filter(Boolean));
  }
  function tell() {
    const s = sequence(), run = ownerOf(s);
    const by = firsts.map((_, n) => n).filter((n) =>
      segments(n).some((p) => token >= p.start && token < p.end));
    const local = Math.floor(token / s.period) * layout.kv.interleave + (token % s.period) - run.start;
    const number = s.local_lens.length === 1 ? token : local;
    const page = Math.floor(number / layout.kv.block_size);
    answer.replaceChildren(`Token ${whole(token)}: computed by pcp ${by.join(" and ") || "none"}` +
      `${by.length > 1 ? " (a copy on each)" : ""}; stored at place ${run.owner} of each DCP group, ` +
      `as its token ${whole(number)}, in its page ${whole(page)} of the sequence.`);
  }
  function choose(value) {
    token = Math.min(Math.max(Math.floor(Number(value)) || 0, 0), Math.max(sequence().seq_len - 1, 0));
    slider.max = field.max = Math.max(sequence().seq_len - 1, 0);
    slider.value = field.value = token;
    tell();
    heddle.fit(drawing, draw);
  }
  const slider = el("input", { type: "range", class: "long", min: 0, value: 0,
    "aria-label": "token, along the sequence", oninput: () => choose(slider.value) });
  const field = el("input", { type: "number", min: 0, value: 0, onchange: () => choose(field.value) });
  choose(0);
  const options = layout.kv.sequences.map((s, i) => [i, `${whole(s.seq_len)} tokens`]);
  return heddle.section("ownership", "Ownership",
    "PCP splits the rows that are computed: early and late rows are paired, so that each rank has " +
    `as much causal work. DCP splits the tokens that are stored, in runs of ${layout.kv.interleave}; ` +
    `a page holds ${layout.kv.block_size} tokens of one rank.` +
    (layout.rotation ? " Each sequence begins at the place that stores least; here it is place 0." : ""),
    el("div", { class: "row" },
      heddle.choice("Prompt of", options, (v) => { which = Number(v); choose(0); }, 0),
      el("label", {}, "Token ", field), slider),
    answer, drawing);
};
