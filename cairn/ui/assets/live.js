// Keeps a page up to date: asks for the same address again and replaces the parts that changed.
// Text of a store is only ever put into a page by the server, which escapes it.
"use strict";

const PERIOD_MS = 2000;
const sources = new Map();
let tag = null;

// The cookie has the token of the first address from now on.
const address = new URL(location.href);
address.searchParams.delete("token");
history.replaceState(history.state, "", address);

const parts = (root) => [...root.querySelectorAll("[data-live]")];

function remember(root) {
  for (const part of parts(root)) sources.set(part.id, part.outerHTML);
}

function keyOf(element) {
  if (element.id) return `#${CSS.escape(element.id)}`;
  if (element.name && element.value) return `[name="${CSS.escape(element.name)}"][value="${CSS.escape(element.value)}"]`;
  const href = element.getAttribute("href");
  return href ? `[href="${CSS.escape(href)}"]` : null;
}

// What a reader did to the old part is done to the new one: what is open, chosen, scrolled and focused.
function carry(before, after) {
  const titles = new Set([...before.querySelectorAll("details[open] > summary")].map((item) => item.textContent));
  for (const item of after.querySelectorAll("details > summary")) item.parentElement.open = titles.has(item.textContent);
  for (const box of before.querySelectorAll("input:checked")) {
    const twin = after.querySelector(keyOf(box));
    if (twin) twin.checked = true;
  }
  for (const kept of before.querySelectorAll("[data-keep]")) after.querySelector(`#${kept.id}`)?.replaceWith(kept);
}

function replacePart(before, after) {
  const focused = before.contains(document.activeElement) ? keyOf(document.activeElement) : null;
  const scrolling = (root) => [...root.querySelectorAll(".wide, .texts")];
  const scrolled = scrolling(before).map((item) => [item.scrollLeft, item.scrollTop]);
  const fresh = document.adoptNode(after);
  carry(before, fresh);
  if (before.value) fresh.value = before.value; // a list to choose from
  before.replaceWith(fresh);
  scrolling(fresh).forEach((item, place) => ([item.scrollLeft, item.scrollTop] = scrolled[place] || [0, 0]));
  if (focused) fresh.querySelector(focused)?.focus({ preventScroll: true });
}

function update(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const [here, there] = [document, fresh].map((root) => parts(root).map((part) => part.id).join());
  if (here !== there) return replaceAll(fresh);
  document.title = fresh.title;
  for (const part of parts(fresh)) {
    const source = part.outerHTML;
    if (sources.get(part.id) === source) continue;
    sources.set(part.id, source);
    replacePart(document.getElementById(part.id), part);
  }
  tellTimes();
}

// A page with other parts than before: a first attempt, or the first answer after a problem.
function replaceAll(fresh) {
  if (fresh.querySelector("[data-curves]") && !window.Plotly) return location.reload();
  remember(fresh);
  document.title = fresh.title;
  for (const id of ["notice", "content"]) replacePart(document.getElementById(id), fresh.getElementById(id));
  document.dispatchEvent(new Event("plots"));
  tellTimes();
}

async function ask(address, known) {
  return fetch(address, { cache: "no-store", headers: known ? { "If-None-Match": known } : {} });
}

async function refresh() {
  if (!document.hidden) {
    try {
      const answer = await ask(location.href, tag);
      const isPage = (answer.headers.get("content-type") || "").startsWith("text/html");
      document.getElementById("unreachable").hidden = answer.status === 304 || isPage;
      if (answer.status !== 304 && isPage) {
        tag = answer.headers.get("etag");
        update(await answer.text());
      }
      document.dispatchEvent(new Event("refreshed"));
    } catch (error) {
      document.getElementById("unreachable").hidden = false;
    }
  }
}

async function keepFresh() {
  await refresh();
  setTimeout(keepFresh, PERIOD_MS);
}

const UNITS = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]];
const words = new Intl.RelativeTimeFormat("en", { numeric: "always", style: "short" });

function tellTimes() {
  for (const time of document.querySelectorAll("time[datetime]")) {
    const seconds = Math.round((Date.parse(time.dateTime) - Date.now()) / 1000);
    const [size, unit] = UNITS.find(([limit]) => Math.abs(seconds) >= limit) || UNITS[3];
    time.title ||= `${time.textContent} UTC`;
    time.textContent = Math.abs(seconds) < 1 ? "now" : words.format(Math.trunc(seconds / size), unit);
  }
}

function searchAsTyped(form) {
  let waiting = null;
  const search = () => {
    const query = new URLSearchParams(new FormData(form));
    history.replaceState(null, "", `/?${query}`);
    tag = null;
    refresh();
  };
  form.addEventListener("submit", (event) => { event.preventDefault(); search(); });
  form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(search, 150); });
}

// What a person asks for goes by fetch: only then a browser says in Origin which page it comes from.
async function send(form, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch(form.action, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error(await answer.text());
  return answer;
}

async function writeNote(form, say) {
  const { text, tags } = form.elements;
  await send(form, { text: text.value, tags: tags.value.split(/\s+/).filter(Boolean) });
  form.reset();
  say("kept");
  tag = null;
  refresh();
}

async function drawText(form, say) {
  const { prompt, step, tokens, temperature, seed } = form.elements;
  const order = { prompt: prompt.value, step: step.value ? Number(step.value) : null };
  for (const field of [tokens, temperature, seed]) order[field.name] = Number(field.value);
  const [shown, stop, leaving] = [form.querySelector("pre"), form.querySelector("[data-stop]"), new AbortController()];
  shown.hidden = stop.hidden = false;
  shown.textContent = "";
  stop.onclick = () => leaving.abort();
  try {
    const answer = await send(form, order, leaving.signal);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "", part; !(part = await reader.read()).done; ) {
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const piece of lines.map((line) => JSON.parse(line))) {
        shown.append(piece.text); // as text, whatever it is
        say(piece.ended ? `${piece.ended}; seed ${order.seed}` : "");
      }
    }
    seed.value = order.seed + 1;
  } finally {
    stop.hidden = true;
    shown.hidden = !shown.textContent;
  }
}

const TASKS = { note: writeNote, prompt: drawText };

document.addEventListener("submit", async (event) => {
  const form = event.target;
  const task = TASKS[form.dataset.task];
  if (!task) return;
  event.preventDefault();
  const button = form.querySelector("button");
  const say = (words) => (form.querySelector("[role=status]").textContent = words);
  button.disabled = true;
  say("…");
  try {
    await task(form, say);
  } catch (error) {
    say(error.name === "AbortError" ? "stopped" : error.message);
  }
  button.disabled = false;
});

remember(document);
tellTimes();
document.querySelectorAll("[data-search]").forEach(searchAsTyped);
document.addEventListener("visibilitychange", refresh);
setInterval(tellTimes, 1000);
setTimeout(keepFresh, PERIOD_MS);
