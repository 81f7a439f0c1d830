// Keeps the page fresh: puts changed parts in place, counts ages, draws the curve, says when what is shown is old.
// Everything that is shown is worded by the server; without this script the page is complete, and stands still.
const html = document.documentElement;
const { live, every } = html.dataset;
const OLD_AFTER_S = live === "poll" ? 3 * every + 15 : 12;
html.classList.add("js");

// --- ages: absolute times in the page, by the clock of whoever made it ---------------------------------------------
let skew_s = html.dataset.made ? html.dataset.made - Date.now() / 1000 : 0;
let made_s = Number(html.dataset.made) || 0;
const now = () => Date.now() / 1000 + skew_s;

export function age(seconds) {
  const s = Math.abs(seconds);
  if (s < 2) return "now";
  if (s < 99.5) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${(s / 3600).toFixed(1)} h` : `${Math.round(s / 86400)} days`;
}

export const ago = (seconds) => (Math.abs(seconds) < 2 ? "just now" : `${age(seconds)} ago`);

function tick(root = document) {
  for (const item of root.querySelectorAll("time[data-at]")) {
    const text = ("ago" in item.dataset ? ago : age)(now() - item.dataset.at);
    if (item.textContent !== text) item.textContent = text;
    if (!item.title) item.title = new Date(item.dataset.at * 1000).toLocaleString();
  }
}

// --- parts: only what differs is touched, so that focus, selection and open lists stay ------------------------------
const key = (node) => node.dataset?.key ?? (node.id || "");

function morph(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || key(old) !== key(fresh)) return old.replaceWith(fresh);
  if (old.nodeType !== Node.ELEMENT_NODE) { old.data = fresh.data; return; }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (!("keep" in old.dataset)) children(old, fresh); // what the script put there is not the server's
}

function children(old, fresh) {
  const known = new Map([...old.children].filter(key).map((child) => [key(child), child]));
  let place = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const mine = key(child) ? known.get(key(child)) : place && !key(place) ? place : null;
    if (mine) {
      if (mine === place) place = place.nextSibling;
      else old.insertBefore(mine, place);
      morph(mine, child);
    } else {
      if (child.dataset?.key) child.classList.add("arrived");
      old.insertBefore(child, place);
    }
  }
  while (place) { const next = place.nextSibling; place.remove(); place = next; }
}

const parser = new DOMParser();
function take(update) {
  if (update.version !== html.dataset.version) return location.reload();
  heard(update.at);
  for (const [name, text] of Object.entries(update.parts)) {
    const fresh = parser.parseFromString(text, "text/html").body.firstElementChild;
    const old = document.getElementById(name);
    if (!old || !fresh) continue;
    tick(fresh);
    morph(old, fresh);
    if (name === "loss") draw();
  }
}

// --- is it live? ----------------------------------------------------------------------------------------------------
const stream = document.getElementById("stream");
const words = document.getElementById("stream-words");
const shown = document.getElementById("stream-age");
let heard_ms = 0;
let is_old = false;

function heard(at) {
  heard_ms = performance.now();
  if (at) { made_s = at; skew_s = at - Date.now() / 1000; }
  say(true);
}

function say(good) {
  stream.className = `stream ${good ? "live" : "old"}`;
  const text = good ? (live === "poll" ? "as of" : "live") : live === "poll" ? "old: made" : "no connection: as of";
  if (words.textContent !== text) words.textContent = text; // a screen reader speaks when it changes, no more often
  is_old = !good;
}

function watch() {
  const silent_s = (performance.now() - heard_ms) / 1000;
  // A board is as old as its file; a live page as what it last heard.
  const old = live === "poll" ? Date.now() / 1000 - made_s > OLD_AFTER_S : silent_s > OLD_AFTER_S;
  if (old !== is_old || !heard_ms) say(!old);
  if (shown) shown.textContent = ago(Date.now() / 1000 - made_s);
}

function listen() {
  const source = new EventSource("events" + location.search);
  source.onopen = () => heard();
  source.onmessage = (event) => take(JSON.parse(event.data));
  source.addEventListener("beat", () => heard());
  source.onerror = () => {
    say(false);
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 3000); // it does not try again by itself
  };
}

async function look() {
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (answer.ok) {
      const page = parser.parseFromString(await answer.text(), "text/html");
      const parts = ["head", ...[...page.querySelectorAll("main section[id]")].map((part) => part.id)];
      if (page.documentElement.dataset.version !== html.dataset.version) return location.reload();
      made_s = Number(page.documentElement.dataset.made) || made_s;
      tick(page);
      for (const name of parts) morph(document.getElementById(name), page.getElementById(name));
      draw();
    }
  } catch { /* the page says its age by itself */ }
  watch();
}

// --- curve ----------------------------------------------------------------------------------------------------------
let chart = null;
let drawn = "";
const colour = (name) => getComputedStyle(html).getPropertyValue(name).trim();
const short = (x) => (x >= 1e12 ? `${+(x / 1e12).toPrecision(3)}T` : x >= 1e9 ? `${+(x / 1e9).toPrecision(3)}G` : x >= 1e6 ? `${+(x / 1e6).toPrecision(3)}M` : x >= 1e3 ? `${+(x / 1e3).toPrecision(3)}k` : `${x}`);

function columns(data, over) {
  const ahead = data.ahead;
  const rows = data[over].map((x, i) => [x, data.loss[i], null, null, null]);
  if (ahead) ahead[over].forEach((x, i) => { if (x !== null) rows.push([x, null, ahead.loss[i], ahead.high[i], ahead.low[i]]); });
  rows.sort((a, b) => a[0] - b[0]);
  return [0, 1, 2, 3, 4].map((column) => rows.map((row) => row[column]));
}

function marks(data) {
  return (u) => {
    if (!axis().time) return;
    u.ctx.save();
    u.ctx.strokeStyle = colour("--bad");
    u.ctx.globalAlpha = 0.55;
    u.ctx.setLineDash([2, 3]);
    for (const at of data.marks) {
      if (at < u.scales.x.min || at > u.scales.x.max) continue;
      const x = Math.round(u.valToPos(at, "x", true)) + 0.5;
      u.ctx.beginPath();
      u.ctx.moveTo(x, u.bbox.top);
      u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
      u.ctx.stroke();
    }
    u.ctx.restore();
  };
}

const axis = () => ({ time: document.querySelector("input[name=axis][value=time]")?.checked });

function draw(force = false) {
  const place = document.getElementById("plot");
  const text = document.getElementById("series")?.textContent;
  if (!place || !text || !window.uPlot) return;
  if (!force && text === drawn) return;
  drawn = text;
  const data = JSON.parse(text);
  if (data.loss.length < 2) return;
  const { time } = axis();
  const filled = columns(data, time ? "at" : "tokens");
  chart?.destroy();
  const ink = colour("--soft"), grid = { stroke: colour("--line"), width: 1 }, accent = colour("--accent");
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const three = (u, v) => (v === null || v === undefined ? "–" : v.toFixed(3));
  chart = new uPlot({
    width: place.clientWidth, height: window.innerWidth < 576 ? 210 : 240, padding: [8, 6, 0, 0],
    scales: { x: { time } },
    cursor: { y: false, points: { size: 7 } },
    legend: { live: true },
    axes: [
      { stroke: ink, grid, ticks: grid, font, ...(time ? {} : { values: (u, all) => all.map(short) }) },
      { stroke: ink, grid, ticks: grid, font, size: 46 },
    ],
    series: [
      { label: time ? "at" : "tokens", value: (u, v) => (v === null ? "–" : time ? new Date(v * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "short" }) : short(v)) },
      { label: "held out", stroke: accent, width: 2, value: three, points: { show: false } },
      { label: "forecast", stroke: accent, width: 2, dash: [5, 5], value: three, points: { show: false } },
      { label: "high", stroke: "transparent", value: three, points: { show: false } },
      { label: "low", stroke: "transparent", value: three, points: { show: false } },
    ],
    bands: [{ series: [3, 4], fill: accent + "22" }],
    hooks: { drawClear: [marks(data)] },
  }, filled, place);
  chart.root.setAttribute("aria-hidden", "true"); // its place has a name, and the sentence below says it in words
  html.classList.add("plotted");
}

// --- hands ----------------------------------------------------------------------------------------------------------
async function copy(button) {
  const text = document.getElementById(button.dataset.copy).textContent.trim();
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not over plain http to another machine
    getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

async function send(form, button) {
  if (form.dataset.sure && !confirm(form.dataset.sure)) return;
  const said = document.getElementById("said");
  button.disabled = true;
  try {
    const answer = await fetch(form.action, { method: "POST", body: new URLSearchParams(new FormData(form)), headers: { Accept: "application/json" } });
    const reply = await answer.json().catch(() => ({}));
    said.textContent = reply.words ? [reply.words, reply.hint].filter(Boolean).join("; ") : (answer.ok ? "Done." : `Not done: ${answer.status} ${answer.statusText}`);
  } catch {
    said.textContent = "Not done: this node does not answer.";
  }
  button.disabled = false;
}

document.addEventListener("click", (event) => {
  const button = event.target.closest?.("button[data-copy]");
  if (button) copy(button);
});
document.addEventListener("submit", (event) => {
  event.preventDefault();
  send(event.target, event.submitter ?? event.target.querySelector("button"));
});
document.addEventListener("change", (event) => { if (event.target.name === "axis") draw(true); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
new ResizeObserver(() => {
  const place = document.getElementById("plot");
  if (chart && place && Math.abs(chart.width - place.clientWidth) > 1) chart.setSize({ width: place.clientWidth, height: chart.height });
}).observe(document.body);

for (const item of document.querySelectorAll("time[data-date]")) item.textContent = new Date(item.dateTime).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
tick();
draw();
watch();
setInterval(() => { tick(); watch(); }, 1000);
if (live === "poll") setInterval(look, 1000 * Math.max(2, every)); else listen();
