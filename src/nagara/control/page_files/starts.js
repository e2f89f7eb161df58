// Starts as stacked bars: where their time went.

import { Rows, bytes, clock, h, seconds, stackedBar } from "./dom.js";
import { addStarts, document_, world } from "./live.js";

export const STAGES = ["acquire", "files", "host", "device", "canary", "unaccounted"];
const WHAT = {
  acquire: "a healthy slot was found", files: "image and model files became visible",
  host: "the process came to be on the CPU side", device: "weights and graphs came to the device",
  canary: "the request with a known answer", unaccounted: "no stage accounts for it",
};

/** Lines about what a start read: bytes, and the tiers they came from. */
export function filesLines(files) {
  if (!files || files.way === "host") return ["files of this machine itself"];
  const lines = [`${files.kind} image: ${files.objects} objects, ${bytes(files.size_bytes)} (${files.way})`];
  if (files.read_bytes !== null) {
    lines.push(`read ${files.read_objects} objects, ${bytes(files.read_bytes)}`);
  }
  for (const tier of files.tiers ?? []) {
    lines.push(`from ${tier.tier}: ${tier.objects} objects, ${bytes(tier.size_bytes)}`);
  }
  if (files.prefetched_objects) {
    lines.push(`ahead of need: ${files.prefetched_objects} objects, ${bytes(files.prefetched_bytes)}`);
  }
  return lines;
}

function partLines(start, stage) {
  const parts = stage === "host" ? start.host : null;
  return parts ? Object.entries(parts).map(([name, value]) => `  ${name} ${seconds(value)}`) : [];
}

function about(start, stage) {
  const value = start.stages[stage] ?? 0;
  const share = start.total_s ? Math.round((100 * value) / start.total_s) : 0;
  const lines = [`${stage} ${seconds(value)} (${share} %)`, WHAT[stage], ...partLines(start, stage)];
  if (stage === "files") lines.push(...filesLines(start.files));
  if (stage === "host" && start.snapshot) lines.push(`from snapshot ${start.snapshot}`);
  return lines.join("\n");
}

/** The bar of one start; `longest_s` fills the width. */
export function stack(start, longest_s, tall = false) {
  const width = longest_s ? (100 * start.total_s) / longest_s : 0;
  const parts = STAGES.map((stage) => [stage, start.stages[stage] ?? 0, () => about(start, stage)]);
  const label = STAGES.map((stage) => `${stage} ${seconds(start.stages[stage] ?? 0)}`).join(", ");
  return stackedBar(parts.filter(([, value]) => value > 0), label,
    { class: tall ? "stack tall" : "stack", style: { width: `${Math.max(0.5, width)}%` } });
}

export function legend() {
  return h("div", { class: "keys" }, STAGES.map((stage) => h("span", { class: `key ${stage}` }, stage)));
}

function kind(start) { return start.kind ?? "failed"; }

function details(start) {
  const rows = STAGES.map((stage) => h("tr", null, h("td", null, stage),
    h("td", { class: "n" }, seconds(start.stages[stage] ?? 0)),
    h("td", { class: "quiet" }, WHAT[stage], stage === "host" && start.host
      ? `: ${Object.entries(start.host).map(([name, value]) => `${name} ${seconds(value)}`).join(", ")}` : "")));
  return h("div", { class: "details" },
    start.error && h("p", { class: "bad" }, `failed: ${start.error}`),
    start.fallback && h("p", { class: "warn" }, `started plainly: ${start.fallback}`),
    start.snapshot && h("p", { class: "quiet" }, `from snapshot ${start.snapshot}`),
    h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "stages" },
      h("table", null, h("thead", null, h("tr", null, h("th", null, "stage"),
        h("th", { class: "n" }, "time"), h("th", null, "what happened"))), h("tbody", null, rows))),
    filesLines(start.files).map((line) => h("p", { class: "quiet small" }, line)));
}

/** A list of starts with those under way above; `show(starts, starting)`. */
export class StartList {
  constructor(withApp) {
    this.withApp = withApp;
    this.node = h("div");
    this.own = false;
    this.longest_s = 0;
    this.open = new Set();
    this.rows = new Rows(this.node, (item) => item.replica, (a, b) => a === b, (item) => this.#row(item));
  }

  show(starts, starting) {
    const longest_s = Math.max(0, ...starts.map((start) => start.total_s));
    if (longest_s !== this.longest_s || this.again) {
      this.longest_s = longest_s;
      this.again = false;
      this.rows.same = () => false;
    } else {
      this.rows.same = (a, b) => a.total_s !== undefined && a === b;
    }
    const ended = new Set(starts.map((start) => start.replica));
    this.rows.show([...starting.filter((each) => !ended.has(each.replica)), ...starts]);
  }

  scale(own) {
    this.own = own;
    this.again = true;
  }

  #row(item) { return item.total_s === undefined ? this.#going(item) : this.#ended(item); }

  #going(item) {
    const since_s = Math.max(0, Date.now() / 1000 - item.since_s);
    return h("div", { class: "start", "data-replica": item.replica }, h("button", { type: "button", disabled: true },
      h("span", { class: "who" }, item.replica), h("span", { class: "pill starting" }, "starting"),
      h("span", { class: "stack-cell" }, h("div", { class: "stack" }, h("div", { class: "going" }))),
      h("span", { class: "total" }, `${Math.round(since_s)} s`), h("span", { class: "when" }, "now")));
  }

  #ended(start) {
    const is_open = this.open.has(start.replica);
    const row = h("div", { class: "start", "data-replica": start.replica });
    const button = h("button", { type: "button", "aria-expanded": String(is_open) },
      h("span", { class: "who" }, start.replica),
      h("span", null, h("span", { class: `pill ${kind(start)}` }, kind(start))),
      h("span", { class: "stack-cell" }, stack(start, this.own ? start.total_s : this.longest_s)),
      h("span", { class: "total" }, seconds(start.total_s)),
      h("span", { class: "when" }, clock(start.started_s)));
    button.addEventListener("click", () => {
      const opens = !this.open.has(start.replica);
      button.setAttribute("aria-expanded", String(opens));
      if (opens) { this.open.add(start.replica); row.append(details(start)); }
      else { this.open.delete(start.replica); row.lastChild.remove(); }
    });
    row.append(button);
    if (is_open) row.append(details(start));
    return row;
  }
}

/** Everything that is starting, of all apps or of one. */
export function starting(app) {
  return [...world.apps.values()].filter((each) => !app || each.name === app)
    .flatMap((each) => each.starts);
}

/** The view of all starts. */
export function startsView(main) {
  const list = new StartList(true);
  let wanted = "";
  let older = 0;
  const note = h("p", { class: "quiet small", role: "status" });
  const choice = h("select", { "aria-label": "Kind", on: { change: () => { wanted = choice.value; draw(); } } },
    ["", "plain", "restored", "failed"].map((each) => h("option", { value: each }, each || "all kinds")));
  const scale = h("select", { "aria-label": "Scale", on: { change: () => { list.scale(scale.value === "own"); draw(); } } },
    h("option", { value: "common" }, "one scale for all"), h("option", { value: "own" }, "each fills its line"));
  const more = h("button", { type: "button", on: { click: go } }, "Older starts");
  main.append(h("h1", null, "Starts"), h("section", { class: "card" },
    h("div", { class: "bar-line" }, choice, scale, h("span", { class: "grow" }, legend())),
    list.node, h("div", { class: "bar-line" }, more, note)));

  async function go() {
    more.disabled = true;
    try {
      const last = world.starts[world.starts.length - 1];
      const path = last ? `/api/starts?limit=200&before=${last.id}` : "/api/starts?limit=200";
      const { starts } = await document_(path);
      older += addStarts(starts, false);
      if (!starts.length) note.textContent = "There are no older ones.";
      draw();
    } catch (error) { note.textContent = error.message; }
    more.disabled = false;
  }

  function draw() {
    const shown = world.starts.filter((start) => !wanted || kind(start) === wanted);
    list.show(shown, wanted ? [] : starting());
    if (!note.textContent || older) note.textContent = `${shown.length} shown`;
  }
  draw();
  return draw;
}
