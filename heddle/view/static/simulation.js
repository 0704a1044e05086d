"use strict";
// Traffic through the real scheduler: percentiles, what limited, how full ranks were, other layouts.
heddle.simulation = (sim) => {
  const { el, seconds, whole, tenth, percent, range, degrees, figure } = heddle;
  const P = ["p50", "p90", "p99"];
  const LACKED = { blocks: "KV blocks", seats: "seats (--max-num-seqs)",
    prefill_slots: "places of prompts in progress", rows: "rows of a step", nothing: "nobody waited" };
  const facts = [["requests", whole(sim.requests)], ["finished", whole(sim.finished)],
    ["refused", whole(sim.rejects)], ["preemptions", whole(sim.preemptions)],
    ["prefix hits", percent(sim.hit_rate)], ["tokens/s", tenth(sim.tok_s)],
    ["tokens/s per device", tenth(sim.tok_s_per_device)], ["simulated time", seconds(sim.duration_s)]];
  if (sim.goodput !== null) facts.push(["in target, req/s", sim.goodput.toFixed(2)]);

  function times() {
    const kinds = [["first token", "ttft"], ["between tokens", "itl"], ["whole answer", "e2e"]];
    const rows = kinds.map(([name, key]) => [name,
      ...[...P, "mean", "max"].map((p) => figure(seconds(sim[key] && sim[key][p]))),
      ...(sim.bounds ? P.map((p) => figure(sim.bounds[key] ? range(sim.bounds[key][p], seconds) : "–"))
        : [])]);
    return heddle.table("Times; bounds are those of the ranges of the device's sheet", ["",
      ...P.map(figure), figure("mean"), figure("largest"),
      ...(sim.bounds ? P.map((p) => figure(`${p} within`)) : [])], rows, { id: "percentiles" });
  }
  function limits() {
    const lacked = Object.entries(sim.limited_by).map(([name, share]) =>
      [LACKED[name] || name, figure(percent(share))]);
    const refusals = Object.entries(sim.reject_reasons).filter(([, n]) => n)
      .map(([name, n]) => [`refused: ${name.replace("_", " ")}`, figure(whole(n))]);
    const starved = sim.decode_starvation;
    return el("div", { class: "beside" },
      heddle.table("What most of those that waited lacked", ["", figure("of the time")], lacked,
        { id: "limits" }),
      heddle.table("Ranks", ["", figure("smallest"), figure("largest"), figure("largest over mean")], [
        ["rows computed", figure(whole(Math.min(...sim.ranks.rows))),
          figure(whole(Math.max(...sim.ranks.rows))), figure(sim.ranks.imbalance.toFixed(3))],
        ["KV tokens at most", figure(whole(Math.min(...sim.ranks.kv_tokens))),
          figure(whole(Math.max(...sim.ranks.kv_tokens))), figure(sim.ranks.kv_imbalance.toFixed(3))],
      ], { id: "ranks" }),
      heddle.table("Answers that were held up", ["", figure("")], [
        ["steps over twice their decode rows' time", figure(percent(starved.share_of_steps))],
        ["longest wait between tokens", figure(seconds(starved.longest_gap_s))], ...refusals],
      { id: "starvation" }));
  }
  function series() {
    const s = sim.series;
    const line = (id, title, y, lines) => heddle.charts.add({ id, title, x: "seconds", y,
      series: lines.map(([label, , color]) => ({ label, color })),
      data: [s.time_s, ...lines.map(([, values]) => values)] });
    return el("div", { class: "charts" },
      line("kv-series", "KV in use", "share of the pool", [["KV in use", s.kv_share, "--c0"]]),
      line("request-series", "Requests", "requests",
        [["running", s.running, "--c2"], ["waiting", s.waiting, "--c1"]]),
      line("token-series", "Output", "tokens/s", [["output", s.tok_s, "--c3"]]));
  }
  function sweep() {
    if (!sim.sweep || sim.sweep.length < 2) return null;
    const of = (e, key, p) => (e[key] ? e[key][p] : null);
    const cloud = (id, key, title, x) => {
      const points = sim.sweep.filter((e) => of(e, key, "p99") !== null)
        .sort((a, b) => of(a, key, "p99") - of(b, key, "p99"));
      return points.length < 2 ? null : heddle.charts.add({ id, title, x, y: "tokens/s per device",
        points: true, series: [{ label: "layouts", color: "--c7", isOpen: true },
          { label: "on the front", color: "--c1", size: 12 }],
        data: [points.map((e) => of(e, key, "p99")), points.map((e) => e.tok_s_per_device),
          points.map((e) => (e.on_front ? e.tok_s_per_device : null))] });
    };
    return [el("h3", {}, "Other layouts under this traffic"),
      el("div", { class: "charts" },
        cloud("gap-front", "itl", "Time between tokens against throughput",
          "seconds between tokens, 99th percentile"),
        cloud("first-front", "ttft", "First token against throughput",
          "seconds to the first token, 99th percentile")),
      heddle.table("Layouts; those on the front are beaten by none in throughput and a time at once",
        ["layout", figure("first token p50"), figure("p99"), figure("between tokens p50"),
          figure("p99"), figure("tokens/s"), figure("per device"), figure("refused"), "on the front"],
        sim.sweep.map((e) => ({ chosen: e.on_front, cells: [degrees(e.layout),
          ...["ttft", "itl"].flatMap((key) => ["p50", "p99"].map((p) => figure(seconds(of(e, key, p))))),
          figure(tenth(e.tok_s)), figure(tenth(e.tok_s_per_device)), figure(whole(e.rejects)),
          e.on_front ? "yes" : "no"] })), { id: "sweep" })];
  }
  return heddle.section("simulation", "Simulated traffic",
    "The engine's own scheduler and block accounting under a modelled clock. Flags: " + sim.flags,
    el("div", { class: "facts" }, heddle.cards(facts)), times(), limits(), series(), sweep(),
    el("ul", { class: "notes" }, sim.notes.map((n) => el("li", {}, n))));
};
