// Snapshots: what is saved of every app, what it is worth, and what was tried.

import { captureWord } from "./apps.js";
import { bytes, clock, h, put, seconds } from "./dom.js";
import { document_, world } from "./live.js";

const FIRST = 200;
const EVERY_MS = 3000;
const BAD = ["in quarantine", "damaged"];
const SAVED = ["snapshot", "state", "needs", "size", "shared", "restores", "failed", "made", "remark"];
const TRIED = ["snapshot", "memory", "layer", "took", "when", "remark"];
const NUMBERS = new Set(["size", "shared", "restores", "failed", "memory", "layer", "took"]);

/** A table that becomes cards on a phone; `rows` is its body. */
function table(names, rows) {
  return h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": names.join(", ") },
    h("table", { class: "cards" }, h("thead", null, h("tr", null,
      names.map((name) => h("th", { class: NUMBERS.has(name) ? "n" : null }, name)))), rows));
}

export function savedTable(rows, withApp) { return table(withApp ? ["app", ...SAVED] : SAVED, rows); }
export function triedTable(rows, withApp) { return table(withApp ? ["app", ...TRIED] : TRIED, rows); }

function cell(label, value, props) {
  return h("td", { "data-label": label, class: NUMBERS.has(label) ? "n" : null, ...props }, value);
}

function appCell(name) { return h("td", null, h("a", { href: `#/app/${encodeURIComponent(name)}` }, name)); }

/** What a host must offer for this variant, and what else tells it from others. */
function needs(one) {
  return h("details", null, h("summary", null, `${one.cpu_flags.length} CPU flags${one.is_wide ? ", wide" : ""}`),
    h("p", { class: "small quiet" }, one.cpu_flags.join(" ")),
    h("p", { class: "small quiet" }, `key ${one.key}; on ${one.machine}`));
}

function remark(one) {
  return [one.is_present === false ? "of an earlier definition" : "",
    one.here_bytes === null ? "" : `${bytes(one.here_bytes)} of it are here`,
    one.misfit ? `does not fit ${one.machine}: ${one.misfit}` : "", ...one.reasons].filter(Boolean).join("; ");
}

function savedRow(one, withApp) {
  const state = BAD.includes(one.state) ? "failed" : one.state === "good" && !one.misfit ? "ready" : "starting";
  const took = one.restored_s === null ? null : h("span", { class: "quiet small" }, ` ${seconds(one.restored_s)}`);
  const failed = one.failed_restores ? h("span", { class: "bad" }, one.failed_restores) : "0";
  const readable = one.state !== "damaged";
  return h("tr", { "data-snapshot": one.snapshot }, withApp ? appCell(one.app) : null, h("td", null, one.snapshot),
    h("td", null, h("span", { class: `pill ${state}` }, one.state)), h("td", { class: "needs" }, readable ? needs(one) : ""),
    cell("size", readable ? bytes(one.memory_bytes + one.layer_bytes) : ""),
    cell("shared", readable ? bytes(one.shared_bytes) : "", { title: `of ${bytes(one.stored_bytes)} in the store` }),
    cell("restores", [String(one.restores), took]), cell("failed", failed),
    cell("made", readable ? clock(one.created_at_s) : ""), h("td", { class: "long quiet small" }, remark(one)));
}

/** The rows of what is saved; `none` says what stands there otherwise. */
export function savedRows(saved, withApp) {
  if (saved.length) return saved.slice(0, FIRST).map((one) => savedRow(one, withApp));
  return [h("tr", null, h("td", { class: "quiet", colspan: SAVED.length + 1 }, "none yet"))];
}

export function triedRows(captures, withApp) {
  if (!captures.length) return [h("tr", null, h("td", { class: "quiet", colspan: TRIED.length + 1 }, "none yet"))];
  return captures.slice(0, FIRST).map((each) => h("tr", null, withApp ? appCell(each.app) : null,
    h("td", null, each.snapshot ?? "none"), cell("memory", each.memory_bytes ? bytes(each.memory_bytes) : ""),
    cell("layer", each.layer_bytes ? bytes(each.layer_bytes) : ""), cell("took", seconds(each.elapsed_s)),
    cell("when", clock(each.finished_s)), h("td", { class: "long quiet small" },
      [each.is_present ? "" : "of an earlier definition", each.reason ?? ""].filter(Boolean).join("; "))));
}

/** Calls `read` when snapshots may have changed, but not more often than every few seconds. */
export function whenChanged(read, app) {
  let seen = null;
  let timer = null;
  let next_ms = 0;
  function look() {
    const apps = app ? [world.apps.get(app)].filter(Boolean) : [...world.apps.values()];
    const now = apps.map((each) => `${each.name} ${each.capture}`).join() + String(world.starts[0]?.id);
    if (now === seen || timer !== null) return;
    timer = setTimeout(() => {
      timer = null;
      seen = now;
      next_ms = Date.now() + EVERY_MS;
      read().catch(() => {});
    }, Math.max(0, next_ms - Date.now()));
  }
  return { look, end: () => clearTimeout(timer) };
}

export function snapshotsView(main) {
  const saved = h("tbody");
  const tried = h("tbody");
  const without = h("ul", { class: "many" });
  const figures = h("dl", { class: "figures" });
  const note = h("p", { class: "quiet small", role: "status" });
  const search = h("input", { type: "search", placeholder: "Find an app", "aria-label": "Find an app", on: { input: draw } });
  let snapshots = [];
  let captures = [];
  main.append(h("h1", null, "Snapshots"), h("section", { class: "card" }, figures),
    h("section", { class: "card" }, h("div", { class: "bar-line" }, h("h2", null, "Saved"), search, note), savedTable(saved, true)),
    h("section", { class: "card" }, h("h2", null, "Apps without a usable one"), without),
    h("section", { class: "card" }, h("h2", null, "Attempts"), triedTable(tried, true)));

  function draw() {
    const wanted = search.value.trim().toLowerCase();
    const fits = (name) => name.toLowerCase().includes(wanted);
    const shown = snapshots.filter((one) => fits(one.app));
    put(saved, savedRows(shown, true));
    note.textContent = shown.length > FIRST ? `the newest ${FIRST} of ${shown.length}` : `${shown.length} of ${snapshots.length}`;
    const have = new Set(snapshots.filter((one) => !BAD.includes(one.state)).map((one) => one.app));
    const aside = new Set(snapshots.filter((one) => one.state === "in quarantine").map((one) => one.app));
    const lacking = [...world.apps.values()].filter((app) => !have.has(app.name) && fits(app.name))
      .sort((a, b) => a.name.localeCompare(b.name));
    put(without, lacking.length ? null : h("li", { class: "quiet" }, "none"), lacking.slice(0, FIRST).map((app) =>
      h("li", null, h("a", { href: `#/app/${encodeURIComponent(app.name)}` }, app.name), ` ${aside.has(app.name) ? "in quarantine" : captureWord(app)}`,
        app.capture_reason ? h("span", { class: "quiet" }, `: ${app.capture_reason}`) : "")),
    lacking.length > FIRST ? h("li", { class: "quiet" }, `and ${lacking.length - FIRST} more`) : null);
    put(tried, triedRows(captures.filter((one) => fits(one.app)), true));
    const sum = (key) => snapshots.reduce((all, one) => all + one[key], 0);
    const counted = { snapshots: snapshots.length, "in the store": bytes(sum("stored_bytes")), restores: sum("restores"),
      "failed restores": sum("failed_restores"), "in quarantine": snapshots.filter((one) => one.state === "in quarantine").length };
    put(figures, Object.entries(counted).map(([key, value]) => h("div", null, h("dt", null, key), h("dd", null, value))));
  }

  async function read() {
    const [{ snapshots: found }, { captures: made }] = await Promise.all([document_("/api/snapshots"), document_("/api/captures")]);
    snapshots = found;
    captures = made;
    draw();
  }

  const news = whenChanged(read);
  draw();
  news.look();
  return Object.assign((what) => { if (what === "sample" || what === "link") news.look(); }, { end: news.end });
}
