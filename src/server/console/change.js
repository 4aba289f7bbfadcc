// What changes things: only after "Allow changes", and never without being asked once more.

import { ask, h, say } from "./dom.js";
import { api, changed, model, reason } from "./model.js";
import { badge, bound, regionName } from "./parts.js";

/** Asks for the token, where there is one. */
export async function unlock() {
  const needsToken = model.state?.changes === "token";
  const token = await ask("Allow changes", (done) =>
    h(
      "form",
      {
        method: "dialog",
        onsubmit: async (event) => {
          event.preventDefault();
          const given = needsToken ? event.target.elements.token.value.trim() : "";
          const wrong = await refused(given);
          if (!wrong) return done(given);
          const problem = event.target.querySelector(".problem");
          problem.textContent = wrong;
        },
      },
      h(
        "p",
        {},
        needsToken
          ? "Changes need the admin token (admin_token_file in region.yaml). It is kept until this page is closed or reloaded."
          : "This daemon has no admin token: whoever is on its machine may make changes.",
      ),
      needsToken && h("label", {}, "Admin token", h("input", { name: "token", type: "password", required: true, autocomplete: "off" })),
      h("p", { class: "problem", role: "alert" }),
      buttons(done, "Allow changes"),
    ),
  );
  if (token === undefined) return;
  model.token = token;
  say("Changes are allowed on this page.");
  changed();
}

export function lock() {
  model.token = undefined;
  say("This page is read-only again.");
  changed();
}

/** Why this token will not do; a check of the policies in force changes nothing. */
async function refused(token) {
  const before = model.token;
  try {
    const now = await api("v1/policies");
    model.token = token;
    const answer = await api("v1/policies?dry_run=1", { method: "PUT", body: now.text });
    return answer.ok ? undefined : reason(answer);
  } catch {
    return "the daemon gives no answer";
  } finally {
    model.token = before;
  }
}

function buttons(done, text, kind = "primary") {
  return h(
    "div",
    { class: "buttons" },
    h("button", { type: "button", class: "quiet", onclick: () => done(undefined) }, "Cancel"),
    h("button", { type: "submit", class: kind }, text),
  );
}

/** A question, then the change, then what became of it. */
async function confirm(title, text, button, act, fields = [], kind = "primary") {
  return ask(title, (done) =>
    h(
      "form",
      {
        method: "dialog",
        onsubmit: async (event) => {
          event.preventDefault();
          const submit = event.target.querySelector("button[type=submit]");
          const problem = event.target.querySelector(".problem");
          submit.disabled = true;
          problem.textContent = "";
          const wrong = await act(event.target.elements, done).catch(() => "no answer: look whether it has happened before you try again");
          submit.disabled = false;
          if (wrong) problem.textContent = wrong;
        },
      },
      h("p", {}, text),
      fields,
      h("p", { class: "problem", role: "alert" }),
      buttons(done, button, kind),
    ),
  );
}

/** Leadership goes to another region. */
export function lead(region) {
  return confirm(
    "Hand leadership over",
    [regionName(region), " is to lead. Leases go on; new ones wait for the moment that it takes."],
    "Hand over",
    async (_, done) => {
      const answer = await api(`v1/regions/${encodeURIComponent(region)}/lead`, { method: "POST" });
      if (!answer.ok) return reason(answer);
      if (answer.json?.done === false) return `not through yet: ${answer.json.waits_for ?? "ask again"}`;
      say(`${region} leads.`);
      return done(true);
    },
  );
}

/** A bucket is full again, in every region. Resolves to `unknown` where the daemon is too old to do it. */
export function reset(policy, keys, what, known) {
  const field = (key, i) => h("label", {}, key, h("input", { name: `key ${i}`, required: true, autocomplete: "off", value: known[i] ?? valueIn(what, key) }));
  return confirm(
    "Reset a bucket",
    ["Every region's part of this bucket of ", h("b", {}, policy), " becomes full again: its limit is handed out once more, on purpose. The reason goes into every region's log."],
    "Reset",
    async (elements, done) => {
      const which = new URLSearchParams(keys.map((key, i) => [key, elements[`key ${i}`].value]));
      const body = JSON.stringify({ reason: elements.reason.value });
      const headers = { "content-type": "application/json" };
      const answer = await api(`v1/buckets/${encodeURIComponent(policy)}/reset?${which}`, { method: "POST", headers, body });
      if (answer.status === 404 || answer.status === 405) {
        say("This daemon cannot reset buckets.");
        return done("unknown");
      }
      if (!answer.ok) return reason(answer);
      const late = answer.json?.waits_for ?? [];
      say(late.length ? `The bucket was reset; still to hear of it: ${late.join(", ")}.` : "The bucket was reset in every region.");
      return done(true);
    },
    [keys.map(field), h("label", {}, "Reason", h("input", { name: "reason", required: true, autocomplete: "off", maxlength: "200" }))],
    "danger",
  );
}

function valueIn(what, key) {
  const part = (what ?? "").split(", ").find((text) => text.startsWith(`${key}=`));
  const value = part?.slice(key.length + 1) ?? "";
  return /[…#]/.test(value) ? "" : value;
}

let draft = { loaded: false };
let redraw = () => {};

/** The editor: write, check, look at what is different, apply. */
export function changeView(again) {
  redraw = again;
  if (!draft.loaded && !draft.loading) loadPolicies();
  return [
    h(
      "div",
      { class: "section-head title" },
      h("h1", {}, "Change policies"),
      draft.version && h("span", { class: "muted" }, `from version ${draft.version}`),
      draft.version && draft.version < model.state.policies_version && badge("warn", `version ${model.state.policies_version} is in force now`),
    ),
    model.token === undefined &&
      h("p", { class: "note" }, "Read-only: allow changes to check and apply. ", h("button", { class: "quiet", onclick: unlock }, "Allow changes…")),
    h("label", { class: "editor" }, h("span", {}, "Policy file (YAML)"), h("textarea", { id: "yaml", spellcheck: "false", rows: "22", readonly: model.token === undefined, oninput: edited })),
    h(
      "div",
      { class: "buttons" },
      h("button", { class: "quiet", onclick: loadPolicies }, "Start over from what is in force"),
      h("button", { class: "primary", disabled: model.token === undefined || draft.busy, onclick: check }, "Check and show what changes"),
    ),
    h("div", { id: "outcome", tabindex: "-1" }, outcome()),
  ];
}

function edited(event) {
  draft.text = event.target.value;
  if (draft.plan || draft.faults || draft.done) {
    draft = { ...draft, plan: undefined, faults: undefined, done: undefined };
    redraw();
  }
}

async function loadPolicies() {
  draft = { loading: true };
  const answer = await api("v1/policies").catch(() => undefined);
  draft = { loaded: Boolean(answer?.ok), version: Number(answer?.etag?.replaceAll('"', "")) || undefined, faults: answer?.ok ? undefined : ["the daemon gives no answer"] };
  draft.text = answer?.ok ? answer.text : "";
  const editor = document.getElementById("yaml");
  if (editor) editor.filled = false;
  redraw();
}

async function put(dry) {
  const yaml = document.getElementById("yaml").value;
  const headers = { "content-type": "application/yaml", "if-match": `"${draft.version}"` };
  return [yaml, await api(`v1/policies${dry ? "?dry_run=1" : ""}`, { method: "PUT", headers, body: yaml })];
}

async function check() {
  draft = { ...draft, busy: true, plan: undefined, faults: undefined, done: undefined };
  redraw();
  try {
    const [yaml, answer] = await put(true);
    if (answer.ok) draft = { ...draft, plan: { yaml, version: answer.json.version, changes: answer.json.changes ?? [] } };
    else draft = { ...draft, faults: faults(answer) };
  } catch {
    draft = { ...draft, faults: ["the daemon gives no answer"] };
  }
  draft.busy = false;
  redraw();
  document.getElementById("outcome")?.focus();
}

function faults(answer) {
  const each = (answer.json?.errors ?? []).map((error) => error.detail);
  return each.length ? each : [reason(answer)];
}

async function apply() {
  draft = { ...draft, busy: true };
  redraw();
  try {
    const [yaml, answer] = await put(false);
    if (yaml !== draft.plan?.yaml) draft = { ...draft, plan: undefined };
    if (answer.ok) draft = { ...draft, plan: undefined, version: answer.json.version, done: answer.json.version };
    else draft = { ...draft, plan: undefined, faults: faults(answer) };
  } catch {
    draft = { ...draft, plan: undefined, faults: ["no answer: look at the version that is in force before you try again"] };
  }
  draft.busy = false;
  if (draft.done) say(`Policies version ${draft.done} is in force.`);
  redraw();
  document.getElementById("outcome")?.focus();
}

function outcome() {
  if (draft.busy) return h("p", { class: "muted" }, "Asking…");
  if (draft.done) return h("p", { class: "note good" }, badge("ok", "Applied"), ` Policies version ${draft.done} is in force.`);
  if (draft.faults) {
    return [
      h("h2", {}, draft.faults.length === 1 ? "One fault" : `${draft.faults.length} faults`),
      h("ul", { class: "faults", role: "alert" }, draft.faults.map((fault) => h("li", {}, faultText(fault)))),
    ];
  }
  if (draft.plan) return plan(draft.plan);
  return "";
}

/** `policies:3:5: what; mend`: the place leads there. */
function faultText(fault) {
  const at = /^policies:(\d+):(\d+): /.exec(fault);
  if (!at) return fault;
  return [h("button", { class: "link", onclick: () => goTo(Number(at[1]), Number(at[2])) }, `line ${at[1]}, column ${at[2]}`), ` ${fault.slice(at[0].length)}`];
}

function goTo(line, column) {
  const editor = document.getElementById("yaml");
  const lines = editor.value.split("\n");
  const start = lines.slice(0, line - 1).reduce((sum, text) => sum + text.length + 1, 0) + column - 1;
  editor.focus();
  editor.setSelectionRange(start, start + Math.max(1, (lines[line - 1] ?? "").length - column + 1));
}

function plan({ version, changes }) {
  if (changes.length === 0) return h("p", { class: "note" }, "It is valid, and the same as what is in force.");
  return [
    h("h2", {}, `Version ${version} would change ${changes.length === 1 ? "one policy" : `${changes.length} policies`}`),
    h("div", { class: "changes" }, changes.map(changeCard)),
    h("div", { class: "buttons" }, h("button", { class: "primary", onclick: apply }, `Apply version ${version} in every region`)),
  ];
}

function changeCard(change) {
  const before = fields(change.before);
  const after = fields(change.after);
  const how = !change.before ? ["ok", "new"] : !change.after ? ["bad", "removed"] : ["warn", "changed"];
  const keys = [...new Set([...before.keys(), ...after.keys()])].filter((key) => before.get(key) !== after.get(key));
  const rows = keys.map((key) => [key, before.get(key), after.get(key)]);
  if (change.guaranteed_before !== change.guarantees_after) rows.push(["at most, in T seconds", change.guaranteed_before && bound(change.guaranteed_before), change.guarantees_after && bound(change.guarantees_after)]);
  const cell = (kind, text) => h("td", { class: text === undefined || text === null ? "" : kind }, text === undefined || text === null ? "–" : [h("span", { class: "unseen" }, kind === "gone" ? "before: " : "after: "), text]);
  return h(
    "article",
    { class: "card change", key: change.name, "aria-label": `${change.name}: ${how[1]}` },
    h("h3", {}, change.name, " ", badge(how[0], how[1])),
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ["Key", "Before", "After"].map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, rows.map(([key, old, now]) => h("tr", { key }, h("th", { scope: "row" }, key), cell("gone", old), cell("come", now)))),
    ),
  );
}

/** `{ a: b, c: { d: e } }` as keys and values, split at the outermost commas. */
export function fields(text) {
  const found = new Map();
  if (!text) return found;
  const inner = text.replace(/^\{ ?/, "").replace(/ ?\}$/, "");
  let depth = 0;
  let quoted = false;
  let start = 0;
  const add = (end) => {
    const field = inner.slice(start, end).trim();
    const colon = field.indexOf(":");
    if (colon > 0) found.set(field.slice(0, colon), field.slice(colon + 1).trim());
    start = end + 1;
  };
  for (let i = 0; i < inner.length; i++) {
    const c = inner[i];
    if (quoted) {
      if (c === "\\") i++;
      else if (c === '"') quoted = false;
    } else if (c === '"') quoted = true;
    else if (c === "{" || c === "[") depth++;
    else if (c === "}" || c === "]") depth--;
    else if (c === "," && depth === 0) add(i);
  }
  add(inner.length);
  return found;
}

/** To be called after the page was drawn: the editor's text outlives the editor, while other views are looked at. */
export function fillEditor() {
  const editor = document.getElementById("yaml");
  if (!editor || editor.filled || draft.text === undefined) return;
  editor.value = draft.text;
  editor.filled = true;
}

