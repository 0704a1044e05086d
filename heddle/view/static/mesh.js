"use strict";
// The ranks of a layout, coloured by one kind of group; a rank tells its place, heads and share.
heddle.mesh = (entry) => {
  const { el, color, whole } = heddle;
  const { layout, places } = entry;
  const { tp, pcp, pp, dp } = layout.layout;
  const inGroup = {};
  for (const [kind, groups] of Object.entries(layout.groups)) {
    inGroup[kind] = [];
    groups.forEach((group, number) =>
      group.forEach((rank, at) => { inGroup[kind][rank] = { number, at, group }; }));
  }
  const kinds = Object.keys(inGroup).filter((k) => layout.groups[k].some((g) => g.length > 1));
  let kind = kinds.includes("dcp") ? "dcp" : kinds[0] || "tp", told = null;
  const buttons = [], planes = [];
  const panel = el("div", { class: "panel", role: "status", "aria-live": "polite", id: "rank" },
    "Point at a rank, or reach it with Tab and the arrow keys.");

  function tell(rank) {
    told = rank;
    const at = places[rank];
    const own = layout.heads && layout.heads[rank];
    const share = inGroup.dcp[rank];
    const facts = [["place", ["dp", "pp", "pcp", "tp"].map((a) => `${a} ${at[a]}`).join(", ")]];
    for (const k of Object.keys(inGroup)) {
      const { number, at: where, group } = inGroup[k][rank];
      const shown = group.length > 16 ? `${group.slice(0, 16).join(" ")} …` : group.join(" ");
      facts.push([`${k} group`, group.length === 1 ? "alone"
        : `${number}, place ${where} of ${group.length}: ranks ${shown}`]);
    }
    if (own) {
      facts.push(["query heads", own.query[1] > own.query[0]
        ? `${own.query[0]} to ${own.query[1] - 1}` : "none"]);
      facts.push(["KV heads stored", own.kv.join(" ") || "none"]);
    }
    facts.push(["KV share", share.group.length === 1 ? "all tokens of its sequences"
      : `one of ${share.group.length} shares of each sequence's tokens`]);
    layout.kv.sequences.forEach((s) =>
      facts.push([`of ${whole(s.seq_len)} tokens`, `stores ${whole(s.local_lens[share.at])}`]));
    panel.replaceChildren(el("h3", {}, `Rank ${rank}`), heddle.pairs(facts));
    mark();
  }
  // The told rank alone is reached with Tab; its mates are outlined, all others are pale.
  function mark() {
    const mates = new Set(told === null ? [] : inGroup[kind][told].group);
    buttons.forEach((button, rank) => {
      const { number } = inGroup[kind][rank];
      const tone = mates.size < 2 ? "" : mates.has(rank) ? " mate" : " far";
      button.className = `rank ${color(number)}${tone}`;
      button.setAttribute("aria-label", `rank ${rank}, ${kind} group ${number}`);
      button.setAttribute("aria-pressed", String(rank === told));
      button.tabIndex = rank === (told || 0) ? 0 : -1;
    });
  }
  function move(event, rank) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: tp, ArrowUp: -tp,
      Home: -rank, End: layout.world_size - 1 - rank };
    const next = rank + (steps[event.key] || 0);
    if (!(event.key in steps) || next < 0 || next >= layout.world_size) return;
    event.preventDefault();
    buttons[next].focus();
  }
  const grids = new Map();
  function gridOf({ dp: replica, pp: stage }) {
    const at = `${replica}.${stage}`;
    if (!grids.has(at)) {
      const words = [dp > 1 ? `replica ${replica}` : "", pp > 1 ? `stage ${stage}` : ""];
      const name = words.filter(Boolean).join(", ") || "all ranks";
      const grid = el("div", { class: "ranks", role: "group",
        "aria-label": `${name}: columns are tp, rows are pcp` });
      grid.style.gridTemplateColumns = `repeat(${tp}, auto)`;
      grids.set(at, grid);
      planes.push(el("div", { class: "plane" },
        el("p", {}, `${name}: tp ${tp} across, pcp ${pcp} down`), grid));
    }
    return grids.get(at);
  }
  places.forEach((at, rank) => {
    buttons[rank] = el("button", {
      type: "button", "data-rank": rank, onmouseenter: () => tell(rank), onfocus: () => tell(rank),
      onclick: () => tell(rank), onkeydown: (event) => move(event, rank),
    }, rank);
    buttons[rank].style.gridArea = `${at.pcp + 1} / ${at.tp + 1}`;
    gridOf(at).append(buttons[rank]);
  });
  mark();
  const picker = heddle.choice("Colour by", Object.keys(inGroup).map((k) => [k, `${k} groups`]),
    (value) => { kind = value; mark(); }, kind);
  const many = layout.groups[kind].length > 8
    ? " There are more groups than colours: the outline round a chosen rank's mates tells them apart."
    : "";
  return heddle.section("mesh", "Mesh",
    `${whole(layout.world_size)} ${layout.world_size === 1 ? "rank" : "ranks"}, ${heddle.degrees(layout.layout)}. Ranks of one colour work ` +
    `together; a chosen rank's mates are outlined.${many}`,
    el("div", { class: "row" }, picker),
    el("div", { class: "split" },
      el("div", { class: `scroll tall${layout.world_size > 128 ? " small" : ""}` }, planes), panel));
};
