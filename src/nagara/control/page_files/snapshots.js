// Snapshots: what every app has, and what was tried.

import { captureWord } from "./apps.js";
import { bytes, clock, h, put, seconds } from "./dom.js";
import { document_, world } from "./live.js";

const FIRST = 200;

export function snapshotsView(main) {
  const body = h("tbody");
  const tried = h("tbody");
  const note = h("p", { class: "quiet small", role: "status" });
  let captures = [];
  let seen = "";
  main.append(h("h1", null, "Snapshots"),
    h("section", { class: "card" }, h("h2", null, "Apps"), table(["app", "snapshot", "size", "made", "remark"], body), note),
    h("section", { class: "card" }, h("h2", null, "Attempts"),
      table(["app", "snapshot", "memory", "layer", "took", "when", "remark"], tried)));

  function table(names, rows) {
    return h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": names.join(", ") },
      h("table", { class: "cards" }, h("thead", null, h("tr", null, names.map((name) => h("th", null, name)))), rows));
  }

  function draw() {
    const apps = [...world.apps.values()].sort((a, b) => a.name.localeCompare(b.name));
    const latest = new Map();
    for (const each of captures) if (each.snapshot && each.is_present && !latest.has(each.app)) latest.set(each.app, each);
    put(body, apps.slice(0, FIRST).map((app) => {
      const made = latest.get(app.name);
      return h("tr", null, h("td", null, h("a", { href: `#/app/${encodeURIComponent(app.name)}` }, app.name)),
        h("td", null, captureWord(app)), h("td", null, made ? bytes(made.memory_bytes + made.layer_bytes) : ""),
        h("td", null, made ? clock(made.finished_s) : ""), h("td", { class: "long quiet small" }, app.capture_reason ?? ""));
    }));
    note.textContent = apps.length > FIRST ? `the first ${FIRST} of ${apps.length} apps; each has its own page` : "";
    put(tried, captures.length ? null : h("tr", null, h("td", { class: "quiet", colspan: 7 }, "none yet")), captures.slice(0, FIRST).map((each) => h("tr", null, h("td", null, each.app), h("td", null, each.snapshot ?? "none"),
      h("td", null, each.memory_bytes ? bytes(each.memory_bytes) : ""), h("td", null, each.layer_bytes ? bytes(each.layer_bytes) : ""),
      h("td", null, seconds(each.elapsed_s)), h("td", null, clock(each.finished_s)),
      h("td", { class: "long quiet small" }, [each.is_present ? "" : "of an earlier definition", each.reason ?? ""].filter(Boolean).join("; ")))));
  }

  async function news() {
    const now = [...world.apps.values()].map((app) => `${app.name} ${app.capture}`).join();
    if (now === seen) return;
    seen = now;
    ({ captures } = await document_("/api/captures"));
    draw();
  }
  draw();
  news().catch(() => {});
  return (what) => { if (what === "apps" || what === "link") news().catch(() => {}); };
}
