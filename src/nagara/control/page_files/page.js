// The page's frame: signing in, which view is shown, light or dark.

import { appView } from "./app.js";
import { appsView } from "./apps.js";
import { h } from "./dom.js";
import { Refused, ask, follow, keep, leave, subscribe, token, world } from "./live.js";
import { poolView } from "./pool.js";
import { snapshotsView } from "./snapshots.js";
import { startsView } from "./starts.js";

const main = document.getElementById("main");
const top_ = document.getElementById("top");
const link = document.getElementById("link");
const theme = document.getElementById("theme");
let view = null;

const VIEWS = { "": appsView, starts: startsView, pool: poolView, snapshots: snapshotsView };

function show(is_first) {
  view?.end?.();
  const [, kind, name] = location.hash.split("/");
  main.replaceChildren();
  document.getElementById("tip").hidden = true;
  view = kind === "app" ? appView(main, decodeURIComponent(name ?? "")) : (VIEWS[kind ?? ""] ?? appsView)(main);
  const here = kind === "app" ? "#/" : `#/${kind ?? ""}`;
  for (const each of top_.querySelectorAll("nav a")) {
    if (each.getAttribute("href") === here) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  document.title = `${main.querySelector("h1").textContent} · nagara`;
  if (!is_first) { main.focus({ preventScroll: true }); scrollTo(0, 0); }
}

function signIn(said) {
  view?.end?.();
  view = null;
  top_.hidden = true;
  const input = h("input", { id: "token", type: "password", autocomplete: "off", required: true, spellcheck: "false" });
  const fault = h("p", { class: "bad", role: "alert" }, said ?? "");
  main.replaceChildren(h("section", { class: "card sign-in" }, h("h1", null, "nagara"),
    h("p", { class: "quiet" }, "The admin token is in ", h("code", null, "admin.token"), " in nagara's state folder."),
    h("form", { on: { submit: enter } }, h("label", { for: "token" }, "Admin token"), input,
      h("button", { class: "main", type: "submit" }, "Sign in")), fault));
  input.focus();

  async function enter(event) {
    event.preventDefault();
    keep(input.value.trim());
    try {
      await ask("/api/apps");
      begin();
    } catch (error) {
      keep(null);
      fault.textContent = error instanceof Refused ? "That is not the admin token." : `nagara does not answer: ${error.message}`;
    }
  }
}

function begin() {
  top_.hidden = false;
  show(true);
  follow(() => { keep(null); signIn("The admin token is another one now."); });
}

function dress(choice) {
  if (choice === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  theme.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[choice];
  theme.setAttribute("aria-label", `Colours: ${choice}`);
  localStorage.setItem("nagara-theme", choice);
}

theme.addEventListener("click", () => {
  const choices = ["auto", "light", "dark"];
  dress(choices[(choices.indexOf(localStorage.getItem("nagara-theme") ?? "auto") + 1) % 3]);
});
document.getElementById("leave").addEventListener("click", () => { leave(); keep(null); signIn(); });
addEventListener("hashchange", () => { if (view) show(false); });
subscribe((what) => {
  link.textContent = world.is_live ? "live" : "connecting…";
  link.className = world.is_live ? "live" : "";
  view?.(what);
});
dress(localStorage.getItem("nagara-theme") ?? "auto");
if (token()) begin();
else signIn();
