// The pool: its level against its target and why, its machines, their health.

import { chart } from "./chart.js";
import { h, number, put, seconds as seconds_, stackedBar } from "./dom.js";
import { document_, world } from "./live.js";

const NAMES = { level: "free now", target: "wanted free", leased: "leased", ready: "machines ready",
  coming: "machines coming", misses: "claims missed", cost_h: "cost per hour", idle_cost_h: "of it idle" };

function checks(machine) {
  if (!machine.checks) return h("span", { class: "quiet" }, "not checked yet");
  const bad = machine.checks.results.filter((each) => each.outcome !== "pass");
  const good = machine.checks.results.length - bad.length;
  return [h("div", { class: "quiet" }, `${machine.checks.kind}: ${good} of ${machine.checks.results.length} passed`),
    bad.map((each) => h("div", { class: each.outcome === "fail" ? "bad small" : "warn small" },
      `${each.name}: ${each.outcome}${each.detail ? `, ${each.detail}` : ""}`))];
}

/** The checks that are under way, and since when. */
function running(machine) {
  if (!machine.running_check) return null;
  return h("div", { class: "small warn", "data-since": machine.check_since_s }, `${machine.running_check} checks are running`);
}

function countUp(body) {
  for (const node of body.querySelectorAll("[data-since]")) {
    const kind = node.textContent.split(" ")[0];
    const since_s = Math.max(0, Date.now() / 1000 - Number(node.dataset.since));
    node.textContent = `${kind} checks are running, ${Math.round(since_s)} s`;
  }
}

function remark(machine) {
  return [machine.reason, machine.is_kept_out ? "no new leases" : "", ...(machine.kept_out ?? []),
    machine.is_silent ? "does not answer" : ""].filter(Boolean).join("; ");
}

function row(machine) {
  const bad = ["lost", "faulty", "unhealthy"].includes(machine.state) || machine.is_silent;
  return h("tr", null, h("td", null, machine.name, machine.address ? h("div", { class: "small quiet" }, machine.address) : null),
    h("td", null, h("span", { class: `pill ${bad ? "failed" : machine.state === "ready" ? "ready" : "starting"}` }, machine.state), running(machine)),
    h("td", { class: "n", "data-label": "leased" }, `${machine.leased} / ${machine.devices}`),
    h("td", { "data-label": "type" }, `${machine.type}, ${machine.region}`),
    h("td", { class: "n", "data-label": "per hour" }, number(machine.price_h)),
    h("td", null, checks(machine)),
    h("td", { class: "long quiet small" }, remark(machine)),
    h("td", { class: "long small" }, machine.leases.map((lease) => lease.app ?? lease.slot).join(", ")));
}

const EVERY_MS = 3000;
const MOST_APPS = 20;

/** What reserved slots were used for, as one bar: busy, and the idle rest by its cause. */
function useBar(seconds) {
  const uses = Object.entries(seconds).filter(([, value]) => value > 0);
  const total = uses.reduce((sum, [, value]) => sum + value, 0);
  if (!total) return h("span", { class: "quiet" }, "nothing was reserved yet");
  const said = uses.map(([use, value]) => `${use} ${Math.round((100 * value) / total)} %`);
  return stackedBar(uses.map(([use, value]) =>
    [`use-${use}`, value, () => `${use}: ${seconds_(value)} (${Math.round((100 * value) / total)} %)`]), said.join(", "));
}

function percent(share) { return share === null ? "–" : `${(100 * share).toFixed(1)} %`; }

function shares(pool, usage) {
  const lines = [h("p", { class: "quiet" }, `${Math.round(100 * pool.utilisation)} % of ready devices are leased.`)];
  if (!usage) return lines;
  const uses = Object.keys(usage.all.seconds);
  const apps = Object.entries(usage.apps).sort(([, a], [, b]) => sum(b.seconds) - sum(a.seconds)).slice(0, MOST_APPS);
  const all = sum(usage.all.seconds);
  const told = (use) => (all ? `${use.replace("_", "-")} ${percent(usage.all.seconds[use] / all)}` : use.replace("_", "-"));
  return [...lines, h("div", { class: "keys above" }, uses.map((use) => h("span", { class: `key use-${use}` }, told(use)))),
    h("div", { class: "compare" }, [["all apps", usage.all], ...apps].flatMap(([name, one]) =>
      [h("span", { class: "small" }, name), useBar(one.seconds), h("strong", null, percent(one.allocation_utilisation))]))];
}

function sum(seconds) { return Object.values(seconds).reduce((all, value) => all + value, 0); }

export function poolView(main) {
  const level = chart("Free devices: level against target", [{ key: "level", name: "free" }, { key: "target", name: "target" }]);
  const used = chart("Devices under a lease", [{ key: "leased", name: "leased" }, { key: "ready", name: "replicas ready" }]);
  const figures = h("dl", { class: "figures" });
  const alerts = h("div", { role: "status" });
  const words = h("ul");
  const share = h("div");
  const body = h("tbody");
  main.append(h("h1", null, "Pool"), alerts, h("div", { class: "row" }, level.card, used.card),
    h("section", { class: "card" }, figures),
    h("div", { class: "row" }, h("section", { class: "card" }, h("h2", null, "Why"), words),
      h("section", { class: "card" }, h("h2", null, "Allocation utilisation"), share)),
    h("section", { class: "card" }, h("h2", null, "Machines"), h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "machines" },
      h("table", { class: "cards" }, h("thead", null, h("tr", null, ["machine", "state"].map((name) => h("th", null, name)),
        h("th", { class: "n" }, "leased"), h("th", null, "type"), h("th", { class: "n" }, "per hour"),
        ["last checks", "remark", "leases"].map((name) => h("th", null, name)))), body))));

  let drawn = null;
  let usage = null;
  async function readUsage() {
    usage = await document_("/api/usage");
    if (world.pool) put(share, shares(world.pool, usage));
  }
  function draw() {
    level.update(world.samples);
    used.update(world.samples);
    countUp(body);
    const pool = world.pool;
    if (!pool || pool === drawn) return;
    drawn = pool;
    put(figures, Object.entries(NAMES).map(([key, name]) => h("div", null, h("dt", null, name), h("dd", null, number(pool[key] ?? 0)))));
    put(alerts, pool.alerts.map((text) => h("p", { class: "card bad" }, text)),
      (pool.stuck ?? []).map((text) => h("p", { class: "card bad" }, `stuck: ${text}`)));
    put(words, (pool.plan?.words ?? []).map((text) => h("li", null, text)));
    put(share, shares(pool, usage));
    put(body, pool.machines.map(row));
    countUp(body);
  }
  draw();
  readUsage().catch(() => {});
  const timer = setInterval(() => { if (!document.hidden) readUsage().catch(() => {}); }, EVERY_MS);
  return Object.assign(draw, { end: () => clearInterval(timer) });
}
