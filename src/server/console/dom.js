// Elements without markup: text is only ever text. And a small reconciler, so that what is focused stays focused while the page
// is drawn anew every second.

const SVG = "http://www.w3.org/2000/svg";
const HANDLERS = ["onclick", "oninput", "onchange", "onsubmit", "onkeydown", "onpointermove", "onpointerleave", "ontoggle"];

/** An HTML element. `props`: attributes, `on...` handlers, `style` as an object, `key` for lists. */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** An SVG element. */
export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element[name] = value;
    else if (name === "key") element.dataset.key = value;
    else if (name === "style") for (const [k, v] of Object.entries(value)) element.style.setProperty(k, v);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (child === undefined || child === null || child === false || child === "") continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Makes the children of `target` like `children`, changing as little as possible. */
export function draw(target, ...children) {
  const next = document.createElement("div");
  append(next, children);
  const focused = document.activeElement;
  reconcile(target, next);
  // A row that moves up the table takes its focus along.
  if (focused !== document.activeElement && focused?.isConnected) focused.focus({ preventScroll: true });
}

function reconcile(target, next) {
  const wanted = [...next.childNodes];
  const keys = new Set(wanted.map((node) => node.dataset?.key).filter(Boolean));
  const keyed = new Map();
  for (const child of [...target.childNodes]) {
    const key = child.dataset?.key;
    if (key && keys.has(key)) keyed.set(key, child);
    else if (key) child.remove();
  }
  let at = target.firstChild;
  for (const node of wanted) {
    const key = node.dataset?.key;
    let old = key ? keyed.get(key) : at;
    if (!key && old?.dataset?.key) old = undefined;
    if (old && same(old, node)) {
      if (old !== at) target.insertBefore(old, at);
      else at = at.nextSibling;
      morph(old, node);
    } else {
      target.insertBefore(node, at);
    }
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}

function same(a, b) {
  return a.nodeType === b.nodeType && a.nodeName === b.nodeName && a.dataset?.key === b.dataset?.key;
}

function morph(old, node) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== node.data) old.data = node.data;
    return;
  }
  // What is marked so looks after itself.
  if (old.nodeType !== Node.ELEMENT_NODE || old.dataset.keep !== undefined) return;
  for (const { name } of [...old.attributes]) {
    if (name !== "style" && name !== "open" && !node.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of [...node.attributes]) {
    if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (old.style.cssText !== node.style.cssText) old.style.cssText = node.style.cssText;
  for (const handler of HANDLERS) {
    if (old[handler] !== node[handler]) old[handler] = node[handler];
  }
  if (old.tagName !== "TEXTAREA") reconcile(old, node);
}

const OWN_MS = 5_000;
let ownUntil = 0;
let waiting;

/** Says something to those who listen to the page, and to nobody else. */
export function say(text) {
  document.getElementById("said").textContent = text;
  ownUntil = Date.now() + OWN_MS;
}

/** The same about what has happened without this person's doing: it waits until what was said of that has been heard. */
export function announce(text) {
  clearTimeout(waiting);
  const wait = ownUntil - Date.now();
  if (wait > 0) waiting = setTimeout(announce, wait, text);
  else document.getElementById("said").textContent = text;
}

/** A question in a dialog; resolves to what `body` gave to its `done`, or `undefined`. */
export function ask(title, body) {
  return new Promise((resolve) => {
    const dialog = document.createElement("dialog");
    const done = (value) => {
      dialog.close();
      dialog.remove();
      resolve(value);
    };
    dialog.setAttribute("aria-labelledby", "dialog-title");
    dialog.append(h("h2", { id: "dialog-title" }, title), body(done));
    dialog.oncancel = (event) => {
      event.preventDefault();
      done(undefined);
    };
    document.getElementById("dialogs").append(dialog);
    dialog.showModal();
  });
}
