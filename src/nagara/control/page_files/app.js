// One app: its replicas, plain starts against restored ones, its snapshots and its log.

import { captureWord, replicaPills } from "./apps.js";
import { clock, h, number, printable, put, seconds } from "./dom.js";
import { ask, document_, world } from "./live.js";
import { savedRows, savedTable, triedRows, triedTable, whenChanged } from "./snapshots.js";
import { StartList, legend, stack, starting } from "./starts.js";

const LOG_BYTES = 65536;
const FIRST_STARTS = 12;
const LOG_EVERY_MS = 2000;

/** The latest plain start and the latest restored one, on one scale. */
function comparison(starts) {
  const latest = ["plain", "restored"].map((kind) => starts.find((start) => start.kind === kind)).filter(Boolean);
  if (!latest.length) return [h("p", { class: "quiet" }, "No start has ended yet.")];
  const longest_s = Math.max(...latest.map((start) => start.total_s));
  const lines = latest.flatMap((start) => [h("span", null, h("span", { class: `pill ${start.kind}` }, start.kind)),
    stack(start, longest_s, true), h("strong", null, seconds(start.total_s))]);
  const [plain, restored] = latest;
  const said = restored && restored.total_s < plain.total_s
    ? h("p", { class: "quiet small" }, `restored ${(plain.total_s / restored.total_s).toFixed(1)} times as fast as plain`) : null;
  return [h("div", { class: "compare" }, lines), said, legend()];
}

function none(rows, columns) {
  return rows.length ? null : h("tr", null, h("td", { class: "quiet", colspan: columns }, "none yet"));
}

export function appView(main, name) {
  const title = h("h1", null, name);
  const state = h("div");
  const figures = h("dl", { class: "figures" });
  const remark = h("p", { class: "bad" });
  const compare = h("div");
  const list = new StartList(false);
  const replicas = h("tbody");
  const saved = h("tbody");
  const tried = h("tbody");
  const log = h("pre", { tabindex: "0", role: "region", "aria-label": `log of ${name}` }, "No log is kept.");
  const choice = h("select", { "aria-label": "Replica", on: { change: () => readLog() } }, h("option", { value: "" }, "newest replica"));
  const whose = h("span", { class: "quiet small" });
  const more = h("button", { type: "button", on: { click: () => { all = true; draw(); } } });
  let all = false;
  let starts = [];
  let seen = "";
  let is_gone = false;
  let has_log = false; // asked for again when the replicas are other ones

  main.append(h("p", { class: "small" }, h("a", { href: "#/" }, "← all apps")), title,
    h("section", { class: "card" }, h("div", { class: "bar-line" }, state), figures, remark),
    h("section", { class: "card" }, h("h2", null, "Where the time of a start goes"), compare),
    h("section", { class: "card" }, h("h2", null, "Starts"), list.node, more),
    h("section", { class: "card" }, h("h2", null, "Replicas"), table(["replica", "state", "for", "slot", "since", "reason"], replicas)),
    h("section", { class: "card" }, h("h2", null, "Snapshots"), savedTable(saved, false), h("h2", { class: "next" }, "Attempts to make one"), triedTable(tried, false)),
    h("section", { class: "card" }, h("div", { class: "bar-line" }, h("h2", null, "Log"), choice, whose), log));

  function table(names, body) {
    return h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": names[0] },
      h("table", null, h("thead", null, h("tr", null, names.map((each) => h("th", null, each)))), body));
  }

  async function readStarts() {
    ({ starts } = await document_(`/api/starts?limit=50&app=${encodeURIComponent(name)}`));
    const { replicas: found } = await document_(`/api/apps/${encodeURIComponent(name)}/replicas`);
    put(replicas, none(found, 6), found.slice(0, 20).map((each) => h("tr", null, h("td", null, each.replica),
      h("td", null, h("span", { class: `pill ${each.state}` }, each.state)),
      h("td", null, each.purpose), h("td", null, each.slot), h("td", null, clock(each.changed_s)),
      h("td", { class: "long quiet small" }, each.reason ?? ""))));
    const before = choice.value;
    put(choice, h("option", { value: "" }, "newest replica"),
      found.slice(0, 20).map((each) => h("option", { value: each.replica }, each.replica)));
    has_log = found.length > 0;
    choice.value = [...choice.options].some((option) => option.value === before) ? before : "";
    if (has_log) readLog();
    draw();
  }

  async function readSnapshots() {
    const [{ snapshots }, { captures }] = await Promise.all(["snapshots", "captures"]
      .map((what) => document_(`/api/${what}?app=${encodeURIComponent(name)}`)));
    put(saved, savedRows(snapshots, false));
    put(tried, triedRows(captures, false));
  }

  async function readLog() {
    try {
      const which = choice.value ? `&replica=${encodeURIComponent(choice.value)}` : "";
      const answer = await ask(`/api/apps/${encodeURIComponent(name)}/logs?tail_bytes=${LOG_BYTES}${which}`);
      const text = printable(await answer.text());
      whose.textContent = answer.headers.get("x-nagara-replica") ?? "";
      if (log.textContent !== text) {
        const follows = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
        log.textContent = text;
        if (follows) log.scrollTop = log.scrollHeight;
      }
    } catch (error) {
      log.textContent = error.message;
      has_log = false;
    }
  }

  function draw(what) {
    const app = world.apps.get(name);
    if (!app) {
      if (!is_gone && world.is_live) put(state, h("span", { class: "pill failed" }, "not deployed"));
      is_gone = true;
      return;
    }
    is_gone = false;
    put(state, replicaPills(app), h("span", { class: "quiet small" }, ` version ${app.version}, ${app.min} to ${app.max} replicas`));
    const shown = { "requests/s": number(app.requests_s), "tokens/s": number(app.tokens_s), running: app.running,
      "in the queue": app.held, snapshot: captureWord(app) };
    put(figures, Object.entries(shown).map(([key, value]) => h("div", null, h("dt", null, key), h("dd", null, value))));
    const said = app.failures ? `${app.failures} failures in a row: ${app.last_failure ?? ""}` : app.capture_reason ? `no snapshot: ${app.capture_reason}` : "";
    remark.textContent = printable(said);
    remark.hidden = !said;
    put(compare, comparison(starts));
    list.show(all ? starts : starts.slice(0, FIRST_STARTS), starting(name));
    more.hidden = all || starts.length <= FIRST_STARTS;
    more.textContent = `Show all ${starts.length}`;
    const news = `${app.ready} ${app.starting} ${app.draining} ${app.stopping} ${app.capture} ${app.failures}`;
    changes.look();
    if (news !== seen || what === "starts") { seen = news; readStarts().catch(() => {}); }
  }

  const changes = whenChanged(readSnapshots, name);
  draw();
  const timer = setInterval(() => { if (has_log && !document.hidden) readLog(); }, LOG_EVERY_MS);
  return Object.assign(draw, { end: () => { clearInterval(timer); changes.end(); } });
}
