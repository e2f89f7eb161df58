// The list of apps, with the rates of all of them together.

import { chart } from "./chart.js";
import { Rows, h, number } from "./dom.js";
import { world } from "./live.js";

const FIRST = 200;

export function replicaPills(app) {
  const pills = ["ready", "starting", "draining", "stopping"].filter((state) => app[state])
    .map((state) => h("span", { class: `pill ${state}` }, `${app[state]} ${state}`));
  return pills.length ? pills : [h("span", { class: "pill zero" }, "at zero")];
}

const CAPTURE = { unknown: "not yet", wanted: "waiting", running: "being made", done: "made",
  failed: "failed once", off: "off" };

export function captureWord(app) { return CAPTURE[app.capture] ?? app.capture; }

function remark(app) {
  if (app.failures) return `${app.failures} failures in a row: ${app.last_failure ?? ""}`;
  if (["failed", "off"].includes(app.capture) && app.capture_reason) return `no snapshot: ${app.capture_reason}`;
  return "";
}

function row(app) {
  const said = remark(app);
  return h("tr", { "data-app": app.name },
    h("td", null, h("a", { href: `#/app/${encodeURIComponent(app.name)}` }, app.name),
      h("span", { class: "quiet small" }, ` v${app.version}`)),
    h("td", null, replicaPills(app)),
    h("td", { class: "n", "data-label": "requests/s" }, number(app.requests_s)),
    h("td", { class: "n", "data-label": "tokens/s" }, number(app.tokens_s)),
    h("td", { class: "n", "data-label": "running" }, app.running),
    h("td", { class: "n", "data-label": "queue" }, app.held),
    h("td", { "data-label": "snapshot" }, captureWord(app)),
    h("td", { class: app.failures ? "long bad small" : "long quiet small" }, said.length > 300 ? `${said.slice(0, 300)}…` : said));
}

/** What needs a look comes first, then what works, then the rest by name. */
function order(a, b) {
  const weight = (app) => (app.failures ? 4 : 0) + (app.held ? 2 : 0)
    + (app.running || app.ready || app.starting ? 1 : 0);
  return weight(b) - weight(a) || a.name.localeCompare(b.name);
}

export function appsView(main) {
  const rates = [
    chart("Requests per second", [{ key: "requests", name: "answered" }, { key: "failures", name: "failed" }]),
    chart("Tokens per second", [{ key: "tokens", name: "tokens" }]),
    chart("Requests in the system", [{ key: "running", name: "running" }, { key: "held", name: "in the queue" }]),
  ];
  const body = h("tbody");
  const rows = new Rows(body, (app) => app.name, (a, b) => a === b, row);
  let all = false;
  const search = h("input", { type: "search", placeholder: "Find an app", "aria-label": "Find an app", on: { input: draw } });
  const more = h("button", { type: "button", on: { click: () => { all = true; draw(); } } });
  const note = h("span", { class: "quiet small", role: "status" });
  const empty = h("p", { class: "quiet" }, "Nothing is deployed yet. Deploy an app file with ", h("code", null, "nagara deploy FILE"), ".");
  const table = h("table", { class: "cards" }, h("thead", null, h("tr", null,
    ["app", "replicas"].map((name) => h("th", null, name)),
    ["requests/s", "tokens/s", "running", "queue"].map((name) => h("th", { class: "n" }, name)),
    h("th", null, "snapshot"), h("th", null, "remark"))), body);
  main.append(h("h1", null, "Apps"), h("div", { class: "row" }, rates.map((rate) => rate.card)),
    h("section", { class: "card" }, h("div", { class: "bar-line" }, search, note),
      h("div", { class: "wide" }, table), empty, more));

  function draw() {
    const wanted = search.value.trim().toLowerCase();
    const found = [...world.apps.values()].filter((app) => app.name.toLowerCase().includes(wanted)).sort(order);
    rows.show(all ? found : found.slice(0, FIRST));
    note.textContent = `${found.length} of ${world.apps.size} apps`;
    more.hidden = all || found.length <= FIRST;
    more.textContent = `Show all ${found.length}`;
    empty.hidden = world.apps.size > 0;
    table.hidden = !empty.hidden;
    for (const rate of rates) rate.update(world.samples);
  }
  draw();
  return draw;
}
