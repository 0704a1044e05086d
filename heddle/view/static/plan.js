"use strict";
// Layouts of a plan side by side: memory, speed, break-even lines, what each rules out.
heddle.plan = (plan) => {
  const { el, svg, bytes, seconds, degrees, whole, tenth, range, color, figure } = heddle;
  const PARTS = [["weights", "weights"], ["activations", "activations"], ["exchange", "exchange"],
    ["kv_pool", "KV pool"], ["states", "recurrent states"], ["reserve", "reserve"]];
  const MOST_BARS = 12, MOST_REFUSED = 400, TOP = 2 ** 21;
  const roles = new Map(plan.recommended.map((r) => [r.candidate, r.roles]));
  const order = plan.candidates.map((c, i) => [c, i])
    .sort((a, b) => roles.has(b[1]) - roles.has(a[1]));
  const told = (c, key, text) => figure(c.predicted ? text(c.predicted[key]) : "–");

  function recommended() {
    return el("div", { class: "cards" }, plan.recommended.map((r) => {
      const { predicted, bands } = r;
      const figures = [["first token", "ttft", seconds], ["per token", "tpot", seconds],
        ["tokens/s", "tok_s", tenth]].map(([name, key, text]) => [name,
        bands[key] ? `${text(predicted[key])} (${range(bands[key], text)})` : text(predicted[key])]);
      return el("div", { class: "panel" }, el("h3", {}, `${degrees(r.layout)}: ${r.roles.join(", ")}`),
        heddle.pairs(figures),
        el("ul", {}, [...r.why, ...r.rules_out.map((t) => `rules out ${t}`), ...r.ties]
          .map((t) => el("li", {}, t))),
        el("code", {}, r.flags));
    }));
  }
  function speeds() {
    return heddle.table("Layouts that fit; recommended ones first",
      ["layout", "recommended for", figure("first token"), figure("per token"), figure("longest gap"),
        figure("tokens/s"), figure("KV tokens"), figure("longest prompt"), figure("fit at once")],
      order.map(([c, i]) => ({ chosen: roles.has(i), cells: [degrees(c.layout),
        (roles.get(i) || []).join(", "), told(c, "ttft", seconds), told(c, "tpot", seconds),
        told(c, "gap", seconds), told(c, "tok_s", tenth), figure(whole(c.tokens_total)),
        figure(whole(c.longest_prompt)), figure(whole(c.concurrency))] })),
      { id: "candidates", tall: order.length > 14 });
  }
  function memory() {
    const rows = order.slice(0, MOST_BARS).map(([c]) => {
      const bar = el("div", { class: "bar", role: "img", "aria-label":
        PARTS.map(([key, name]) => `${name} ${bytes(c.memory[key])}`).join(", ") });
      PARTS.forEach(([key, name], i) => {
        const part = el("span", { class: color(i), title: `${name}: ${bytes(c.memory[key])}` });
        part.style.width = `${(100 * c.memory[key]) / c.memory.device}%`;
        bar.append(part);
      });
      return [degrees(c.layout), bar, ...PARTS.map(([key]) => figure(bytes(c.memory[key]))),
        figure(bytes(c.memory.headroom))];
    });
    return [el("h3", {}, "Memory"),
      el("p", {}, PARTS.map(([, name], i) =>
        el("span", { class: "key" }, el("i", { class: color(i) }), name))),
      heddle.table("The rank that holds most, under each layout; a bar is the whole device",
        ["layout", "", ...PARTS.map(([, name]) => figure(name)), figure("free")], rows,
        { id: "memory" }),
      order.length > MOST_BARS ? el("p", { class: "notes" },
        `${order.length - MOST_BARS} more layouts are in the table above alone.`) : null];
  }
  function front() {
    const points = plan.candidates.filter((c) => c.predicted)
      .map((c) => [c.predicted.ttft, c.predicted.tok_s])
      .sort((a, b) => a[0] - b[0] || b[1] - a[1]);
    if (points.length < 2) return null;
    let most = -Infinity;
    const on = points.map(([, y]) => (y > most ? (most = y) : null));
    return heddle.charts.add({ id: "front", title: "First token against throughput", points: true,
      x: "seconds to the first token", y: "tokens/s", series: [
        { label: "layouts", color: "--c7", isOpen: true },
        { label: "no other is better in both", color: "--c1", size: 12 }],
      data: [points.map((p) => p[0]), points.map((p) => p[1]), on] });
  }
  function breakEven() {
    if (!plan.break_even.length) return null;
    const words = { pcp: "prompts longer than", dcp: "contexts longer than" };
    const tokens = (n) => (n === null ? "never" : whole(n));
    return [el("h3", {}, "Where a split begins to pay"), lines(),
      heddle.table("Break-even lines; bands are those of the ranges of the device's sheet",
        ["split", "layout", "against", "pays for", figure("tokens"), figure("band")],
        plan.break_even.map((b) => [b.what, b.layout, b.against, words[b.what] || "tokens above",
          figure(tokens(b.tokens)), figure(b.band ? [...new Set(b.band.map(tokens))].join(" to ") : "–")]),
        { id: "break-even" })];
  }
  function lines() {
    const box = el("div", { class: "scroll" });
    return heddle.fit(box, (space) => {
      const width = Math.max(space, 620), left = 0.42 * width, LANE = 26;
      const height = plan.break_even.length * LANE + 24;
      const x = (n) => left + (width - left - 24) *
        (Math.log2(Math.max(Math.min(n === null ? TOP : n, TOP), 1)) / Math.log2(TOP));
      const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
        "aria-label": "break-even lines on a scale of powers of two; figures are in the table below" });
      for (const [n, name] of [[1, "1"], [32, "32"], [1024, "1,024"], [32768, "32K"], [1048576, "1M"]]) {
        picture.append(svg("line", { class: "axis", x1: x(n), x2: x(n), y1: 0, y2: height - 20 }),
          svg("text", { x: x(n), y: height - 6, "text-anchor": "middle" }, name));
      }
      plan.break_even.forEach((b, i) => {
        const y = i * LANE, band = b.band || [b.tokens, b.tokens];
        const text = `${b.what}: ${b.layout}`, most = Math.floor(left / 6.6);
        picture.append(svg("text", { x: 0, y: y + 16 },
          text.length > most ? `${text.slice(0, most - 1)}…` : text, svg("title", {}, text)));
        picture.append(svg("rect", { x: x(band[0]), y: y + 5, height: 14,
          width: Math.max(x(band[1]) - x(band[0]), 3), class: color(b.what === "pcp" ? 0 : 1) }));
        if (b.tokens !== null) {
          picture.append(svg("line", { class: "mark", x1: x(b.tokens), x2: x(b.tokens),
            y1: y + 2, y2: y + 22 }));
        }
      });
      box.replaceChildren(picture);
    });
  }
  function traffic() {
    const rows = plan.recommended.flatMap((r) => r.traffic.flatMap((t) => t.groups.map((g) =>
      [degrees(r.layout), t.step, g.group, figure(whole(g.ranks)), g.crosses_hosts ? "yes" : "no",
        figure(whole(g.calls)), figure(whole(g.bytes))])));
    const reasons = [...new Set(plan.recommended.flatMap((r) => r.traffic.flatMap((t) => t.reasons)))];
    return rows.length ? el("details", {}, el("summary", {}, "What a step sends, and why"),
      heddle.table("Of rank 0, a step", ["layout", "step", "group", figure("ranks"), "between hosts",
        figure("calls"), figure("bytes received")], rows, { id: "traffic" }),
      el("ul", { class: "notes" }, reasons.map((t) => el("li", {}, t)))) : null;
  }
  function refused() {
    const shown = plan.refused.slice(0, MOST_REFUSED);
    return shown.length ? el("details", {}, el("summary", {}, `${plan.refused.length} refused layouts`),
      heddle.table(shown.length < plan.refused.length ? `The first ${shown.length}` : "All of them",
        ["layout", "because", "nearest that is legal"], shown.map((r) =>
          [degrees(r.layout), r.reasons.join("; "), r.nearest.join(" | ")]), { id: "refused" })) : null;
  }
  const load = plan.workload, count = plan.candidates.length;
  return heddle.section("plan", "Layouts side by side",
    `${whole(load.concurrency)} requests at once, each ${whole(load.prompt_len)} tokens with an ` +
    `answer of ${whole(load.output_len)}. ${count} ${count === 1 ? "layout fits" : "layouts fit"}, ` +
    `${plan.refused.length} are refused.`,
    recommended(), speeds(), memory(), front(), breakEven(), traffic(), refused(),
    el("ul", { class: "notes" }, plan.notes.map((n) => el("li", {}, n))));
};
