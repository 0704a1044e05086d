"use strict";
// A running server: what it told of itself once, or on its own page what it tells every second.
heddle.server = (info) => {
  const { el, whole } = heddle;
  const flat = (found, prefix) => Object.entries(found).flatMap(([name, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value)
      ? flat(value, `${prefix}${name}.`)
      : [[prefix + name, Array.isArray(value) ? value.join(", ") : String(value)]]);
  const facts = [["phase", info.phase], ["open requests", whole(info.open_requests)],
    ["KV tokens in all", whole(info.kv_tokens_total)], ["longest prompt", whole(info.longest_prompt)],
    ["restarts", whole(info.restarts)]];
  return heddle.section("server", "Server", `Version ${info.version}, when this page was made.`,
    el("div", { class: "facts" }, heddle.cards(facts)),
    el("ul", { class: "notes" }, info.engine.reasons.map((r) => el("li", {}, r))),
    heddle.table("Counters since the start", ["name", "value"], flat(info.counters, ""),
      { id: "counters", tall: true }),
    el("details", {}, el("summary", {}, "Settings"),
      heddle.table("Settings", ["name", "value"],
        [...flat(info.engine, ""), ...flat(info.server, "server.")], { id: "settings" })));
};

heddle.live = () => {
  const { el, whole, tenth, percent } = heddle;
  const KEPT = 300, EVERY = 1000, STORE = "heddle-key";
  const seen = { time: [], running: [], waiting: [], kv: [], rate: [] };
  let key = sessionStorage.getItem(STORE) || "", last = null, is_asking = false, wants_key = false;
  const state = el("p", { role: "status", "aria-live": "polite", id: "state" }, "Asking the server …");
  const shown = el("div", { class: "facts", id: "now" });
  const field = el("input", { type: "password", autocomplete: "off", id: "key" });
  field.value = key;
  const form = el("form", { class: "row", onsubmit: (event) => {
    event.preventDefault();
    key = field.value;
    if (key) sessionStorage.setItem(STORE, key);
    else sessionStorage.removeItem(STORE);
    wants_key = false;
    ask();
  } }, el("label", { for: "key" }, "API key"), field, el("button", { type: "submit" }, "Use this key"));
  const charts = el("div", { class: "charts", hidden: true });
  const chart = (id, title, y, lines) => {
    const made = heddle.charts.add({ id, title, x: "seconds ago", y,
      series: lines.map(([label, , color]) => ({ label, color })), data: [[], ...lines.map(() => [])] });
    charts.append(made);
    return () => {
      const end = seen.time[seen.time.length - 1];
      made.take([seen.time.map((t) => t - end), ...lines.map(([, name]) => [...seen[name]])]);
    };
  };
  const draws = [
    chart("kv-series", "KV in use", "share of the pool", [["KV in use", "kv", "--c0"]]),
    chart("request-series", "Requests", "requests",
      [["running", "running", "--c2"], ["waiting", "waiting", "--c1"]]),
    chart("token-series", "Output", "tokens/s", [["output", "rate", "--c3"]])];
  const mesh = el("div");

  // The key is kept for this tab alone, and goes to this server alone.
  async function ask() {
    if (is_asking || wants_key) return;
    is_asking = true;
    try {
      const headers = key ? { Authorization: `Bearer ${key}` } : {};
      const answer = await fetch(mesh.childElementCount ? "load" : "load?layout=1",
        { headers, cache: "no-store", credentials: "omit" });
      wants_key = answer.status === 401;
      if (wants_key) say(key ? "The server does not know this key." : "The server wants a key.");
      else if (!answer.ok) say(`The server answers ${answer.status}.`);
      else take(await answer.json());
    } catch (error) {
      say(error instanceof TypeError ? "The server cannot be reached." : `This page failed: ${error}`);
    } finally {
      is_asking = false;
    }
  }
  function say(text) {
    if (state.textContent !== text) state.textContent = text;
  }
  function take(found) {
    const now = performance.now() / 1000;
    // A new life of the engine counts from nothing.
    const since = last && found.generated_tokens >= last.tokens && now - last.now;
    const rate = since ? (found.generated_tokens - last.tokens) / since : 0;
    last = { tokens: found.generated_tokens, now };
    for (const [name, value] of [["time", now], ["running", found.running],
      ["waiting", found.waiting], ["kv", found.kv_share], ["rate", rate]]) {
      seen[name].push(value);
      if (seen[name].length > KEPT) seen[name].shift();
    }
    say(`${found.phase}${found.epoch ? `, restarted ${found.epoch} times` : ""}.`);
    shown.replaceChildren(...heddle.cards([["running", whole(found.running)],
      ["waiting", whole(found.waiting)], ["open requests", whole(found.server_load)],
      ["KV in use", percent(found.kv_share)], ["KV tokens in all", whole(found.kv_tokens_total)],
      ["tokens/s", tenth(rate)]]));
    draws.forEach((draw) => draw());
    if (charts.hidden) {
      charts.hidden = false;
      heddle.refit();
    }
    if (found.layout && !mesh.childElementCount) {
      mesh.append(heddle.mesh(found.layout), heddle.ownership(found.layout));
      heddle.contents();
      heddle.refit();
    }
    document.body.dataset.live = String(seen.time.length);
  }
  setInterval(() => { if (!document.hidden) ask(); }, EVERY);
  ask();
  return [heddle.section("live", "Now",
    "Asked of this server every second while this page is seen. Counters and settings are on the " +
    "admin socket: heddle view unix:PATH.", state, form, shown, charts), mesh];
};
