
"use strict";
// Asks the target once a second, and shows what changed. Names and texts are put in as text, never
// as markup. All numbers that grow are counters since the start of the target: what is shown is
// what they grew by.
const STEP_MS = 1000;
const PATIENCE_MS = 4000;
const SPAN = 120;
const WINDOW = 5;
const KINDS_BAD = new Set(["lost-writes", "store-error", "store-fault", "state-dir", "device"]);
const KINDS_CALM = new Set(["connect", "resume", "leave", "drain"]);

const by = (id) => document.getElementById(id);
const set = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const node = (tag, name) => {
  const made = document.createElement(tag);
  if (name) made.className = name;
  return made;
};

// The answers of the last two minutes, oldest first: [seconds, status].
let past = [];
let seen = 0;
let instance = "";
let lostAt = null;
let heardAt = null;

// Numbers for people.
function count(n) {
  if (n < 9995) return n < 9.95 && n % 1 ? n.toFixed(1) : Math.round(n).toString();
  if (n < 999500) return (n / 1e3).toFixed(n < 99950 ? 1 : 0) + "k";
  return (n / 1e6).toFixed(1) + "M";
}
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return (n < 10 && n % 1 ? n.toFixed(1) : Math.round(n)) + " " + units[unit];
}
function micros(us) {
  if (us === null) return "–";
  if (us < 1000) return Math.round(us) + " µs";
  if (us < 1e6) return (us / 1e3).toFixed(us < 1e4 ? 1 : 0) + " ms";
  return (us / 1e6).toFixed(1) + " s";
}
function span(seconds) {
  const [d, h, m] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  if (d) return d + " d " + h + " h";
  if (h) return h + " h " + m + " min";
  return m ? m + " min" : seconds + " s";
}
const clock = (ms) => new Date(ms).toLocaleTimeString([], { hour12: false });
const share = (part, whole) => (whole > 0 ? Math.round((100 * part) / whole) + " %" : "–");

const times = (volume, op) => volume.latency[op].total;
const named = (status, name) => status.volumes.find((volume) => volume.name === name);

// How much each bucket of a histogram grew, as [upper_us, count].
function growth(now, before) {
  const old = new Map(before ? before.buckets : []);
  return (now ? now.buckets : [])
    .map(([upper, count]) => [upper, count - (old.get(upper) || 0)])
    .filter(([, count]) => count > 0);
}
function quantile(buckets, part) {
  const all = buckets.reduce((sum, [, count]) => sum + count, 0);
  let left = all * part;
  for (const [upper, count] of buckets) {
    left -= count;
    if (left <= 0) return upper === null ? 67e6 : middle(upper);
  }
  return null;
}
// A bucket is a quarter of an octave or less wide.
const middle = (upper) => (upper <= 8 ? upper - 1 : upper * 0.9);

// The answer that is a few seconds older than the last, for rates and quantiles.
function earlier() {
  return past[Math.max(0, past.length - 1 - WINDOW)];
}

function showHead(status) {
  document.title = status.name + " – rblk target";
  set(by("name"), status.name);
  const state = status.draining ? "draining" : "serving";
  const badge = by("state");
  set(badge, state);
  badge.className = "badge " + (status.draining ? "warn" : "ok");
  const access = status.insecure ? "everybody may do everything" : status.auth === "required" ? "hosts prove their keys" : "no authentication";
  set(by("about"), `rblk ${status.version}, up ${span(status.uptime_s)}, ${access} · ${status.listen.join(" · ")}`);
  if (status.drain) {
    const left = status.drain.left_ms > 0 ? `ended in ${Math.ceil(status.drain.left_ms / 1000)} s at the latest` : "ending";
    banner("warn", `This target is draining: sessions left: ${status.drain.sessions}, ${left}.`, "draining");
  } else if (faults(status).length) {
    banner("bad", faults(status).join(" · "), "live");
  } else {
    banner(null, "", "live");
  }
}

// What is wrong with the files that the target uses.
function faults(status) {
  const said = (fault) => fault.text + (fault.advice ? ": " + fault.advice : "");
  const stores = status.volumes.filter((volume) => volume.store_fault);
  const list = stores.map((volume) => volume.name + ": " + said(volume.store_fault));
  return status.state_dir_fault ? [status.state_dir_fault, ...list] : list;
}

function banner(kind, text, state) {
  const strip = by("banner");
  strip.hidden = kind === null;
  strip.className = kind || "";
  set(strip, text);
  document.documentElement.dataset.state = state;
}

function showNow(status, before, seconds) {
  const per = (key) => (seconds > 0 ? (status.total[key] - before.total[key]) / seconds : 0);
  set(by("reads"), count(per("reads")) + "/s");
  set(by("reads-more"), bytes(per("read_bytes")) + "/s");
  set(by("writes"), count(per("writes")) + "/s");
  set(by("writes-more"), bytes(per("written_bytes")) + "/s");
  const hits = status.total.cache_hits - before.total.cache_hits;
  const misses = status.total.cache_misses - before.total.cache_misses;
  const { cache_hits, cache_misses, cached_bytes, dirty_bytes } = status.total;
  set(by("hits"), share(hits, hits + misses) + (hits + misses ? " hits" : ""));
  const asked = cache_hits + cache_misses;
  set(by("hits-more"), asked ? share(cache_hits, asked) + " since the start" : "nothing was read by it yet");
  const clean = Math.max(0, cached_bytes - dirty_bytes);
  by("bar-clean").style.width = (100 * clean) / status.arena_bytes + "%";
  by("bar-dirty").style.width = (100 * dirty_bytes) / status.arena_bytes + "%";
  const limit = status.total.dirty_max_bytes ? ` of at most ${bytes(status.total.dirty_max_bytes)}` : "";
  set(by("arena"), `${bytes(cached_bytes)} of ${bytes(status.arena_bytes)} cached, ${bytes(dirty_bytes)} dirty${limit}`);
}

// Rows are kept, so that a selection of text survives. A row that is gone may come back: it is kept
// for as many answers as ABSENT, and no more than SPARE of them are.
const ABSENT = 60;
const SPARE = 256;
const rows = new Map();
function forget(id, wanted) {
  const gone = [];
  for (const [place, kept] of rows) {
    if (!place.startsWith(id + " ")) continue;
    kept.absent = wanted.has(kept.row) ? 0 : kept.absent + 1;
    if (kept.absent > 0) gone.push([kept.absent, place]);
  }
  gone.sort(([a], [b]) => a - b);
  gone.forEach(([absent, place], at) => { if (absent > ABSENT || at >= SPARE) rows.delete(place); });
}
function table(id, list, key, cells) {
  const body = by(id).tBodies[0];
  const heads = [...by(id).tHead.rows[0].cells];
  const wanted = list.map((item) => {
    const place = id + " " + key(item);
    if (!rows.has(place)) {
      const row = node("tr");
      heads.forEach((head) => {
        const cell = node("td");
        cell.dataset.label = head.textContent;
        row.append(cell);
      });
      rows.set(place, { row, absent: 0 });
    }
    const { row } = rows.get(place);
    cells(item).forEach(([text, kind], at) => {
      set(row.cells[at], text);
      row.cells[at].className = (heads[at].className + " " + (kind || "")).trim();
    });
    return row;
  });
  if (wanted.length !== body.rows.length || wanted.some((row, at) => body.rows[at] !== row)) {
    body.replaceChildren(...wanted);
  }
  forget(id, new Set(wanted));
  by(id).hidden = list.length === 0;
  by(id).nextElementSibling.hidden = list.length !== 0;
}

// Reads, writes and MiB a second.
function rates(now, was, seconds) {
  const per = (key) => (seconds > 0 ? Math.max(0, now[key] - was[key]) / seconds : 0);
  const cell = (value) => [count(value), value ? "" : "dim"];
  return [cell(per("reads")), cell(per("writes")), cell((per("read_bytes") + per("written_bytes")) / 1048576)];
}

function showVolumes(status, before, seconds) {
  table("volumes", status.volumes, (volume) => volume.name, (volume) => {
    const old = named(before, volume.name) || volume;
    const both = (op) => {
      const grown = growth(times(volume, op), times(old, op));
      return grown.length ? [micros(quantile(grown, 0.5)) + " · " + micros(quantile(grown, 0.99))] : ["–", "dim"];
    };
    const { hits, misses, dirty_bytes, failed_blocks, store_errors } = volume.counts;
    const trouble = failed_blocks ? "bad" : store_errors ? "warn" : "";
    const holder = volume.holder;
    const fault = volume.store_fault ? ", store " + volume.store_fault.kind : "";
    const access = (volume.read_only ? ", read-only" : "") + fault;
    return [
      [volume.name],
      [bytes(volume.size_bytes)],
      [(volume.store === "file" ? volume.cache : volume.store) + access, fault ? "bad" : ""],
      [share(hits, hits + misses), hits + misses ? "" : "dim"],
      [failed_blocks ? `${bytes(dirty_bytes)}, store fails` : bytes(dirty_bytes), trouble || (dirty_bytes ? "" : "dim")],
      ...rates(volume.io, old.io, seconds),
      both("read"),
      both("write"),
      holder ? [holder.host + (holder.present ? "" : " (away)"), holder.present ? "" : "warn"] : ["–", "dim"],
    ];
  });
}

function showSessions(status, before, seconds) {
  table("sessions", status.sessions, (session) => session.number, (session) => {
    const words = [session.key ? "key" : "", session.encrypted ? "encrypted" : "", session.digest ? "digests" : ""];
    const guard = words.filter(Boolean).join(", ");
    const away = session.connections === 0;
    const old = before.sessions.find((other) => other.number === session.number) || session;
    return [
      [session.host],
      [session.peer],
      away ? ["0, away", "warn"] : [String(session.connections)],
      ...rates(session.io, old.io, seconds),
      [count(session.io.in_flight), session.io.in_flight ? "" : "dim"],
      session.fenced ? ["fenced", "bad"] : [guard || "none", guard ? "" : "dim"],
      [session.volumes.join(", ") || "–", session.volumes.length ? "" : "dim"],
    ];
  });
}

function showEvents(events) {
  const list = by("events");
  for (const event of events) {
    const item = node("li");
    const at = node("time");
    const kind = node("span", "kind");
    const text = node("span");
    at.dateTime = new Date(event.unix_ms).toISOString();
    at.title = at.dateTime;
    set(at, clock(event.unix_ms));
    set(kind, event.kind);
    kind.classList.add(KINDS_BAD.has(event.kind) ? "bad" : KINDS_CALM.has(event.kind) ? "kind" : "warn");
    const who = [event.host, event.volume].filter(Boolean).join(", ");
    if (who) {
      const strong = node("b");
      set(strong, who);
      text.append(strong, ": ");
    }
    text.append(event.text, event.left_out ? ` (${event.left_out} more before it)` : "");
    item.append(at, kind, text);
    list.prepend(item);
  }
  while (list.children.length > 200) list.lastElementChild.remove();
  list.nextElementSibling.hidden = list.children.length > 0;
}

// The heat map: a column for each second, two rows for each power of two, from 1 µs to 16 s.
const OCTAVES = 24;
function chooseVolumes(status) {
  const select = by("heat-volume");
  const names = ["", ...status.volumes.map((volume) => volume.name)];
  const shown = [...select.options].map((option) => option.value);
  if (names.join("\n") === shown.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => {
    const option = node("option");
    option.value = name;
    set(option, name || "all");
    return option;
  }));
  select.value = names.includes(chosen) ? chosen : "";
}
function column(at) {
  const [[, before], [, now]] = [past[at - 1], past[at]];
  const [name, op] = [by("heat-volume").value, by("heat-op").value];
  const volumes = now.volumes.filter((volume) => !name || volume.name === name);
  return volumes.flatMap((volume) => {
    const old = named(before, volume.name);
    return old ? growth(times(volume, op), times(old, op)) : [];
  });
}
const sorted = (buckets) => buckets.sort((a, b) => (a[0] === null) - (b[0] === null) || a[0] - b[0]);
function drawHeat() {
  const canvas = by("heat");
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (!width) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const [left, bottom] = [56, 20];
  const [w, h] = [width - left, height - bottom];
  const level = (us) => h - (Math.log2(Math.max(us, 1)) / OCTAVES) * h;
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  for (let us = 1; us <= 1e7; us *= 10) {
    const y = Math.round(level(us)) + 0.5;
    pen.strokeStyle = color("--line");
    pen.beginPath();
    pen.moveTo(left, y);
    pen.lineTo(width, y);
    pen.stroke();
    pen.fillStyle = color("--muted");
    pen.textAlign = "right";
    if (y > 6) pen.fillText(micros(us).replace(".0", ""), left - 8, Math.min(y, h - 6));
  }
  pen.textBaseline = "bottom";
  pen.fillStyle = color("--muted");
  for (const [ago, align] of [[120, "left"], [60, "center"], [0, "right"]]) {
    pen.textAlign = align;
    pen.fillText(ago ? `${ago} s ago` : "now", left + w * (1 - ago / SPAN), height - 1);
  }
  const last = past.length ? past[past.length - 1][0] : 0;
  const columns = [];
  for (let at = 1; at < past.length; at += 1) {
    const x = left + w * (1 - (last - past[at - 1][0]) / SPAN);
    const end = left + w * (1 - (last - past[at][0]) / SPAN);
    if (end > left) columns.push({ x: Math.max(x, left), end, buckets: sorted(column(at)) });
  }
  let most = 1;
  const cells = columns.map(({ x, end, buckets }) => {
    const cell = new Map();
    for (const [upper, n] of buckets) {
      const row = Math.min(2 * OCTAVES - 1, Math.floor(2 * Math.log2(Math.max(1, upper === null ? 2 ** 24 : middle(upper)))));
      cell.set(row, (cell.get(row) || 0) + n / (end - x || 1));
      most = Math.max(most, cell.get(row));
    }
    return cell;
  });
  const tall = h / (2 * OCTAVES);
  pen.fillStyle = color("--accent");
  columns.forEach(({ x, end }, at) => {
    for (const [row, n] of cells[at]) {
      pen.globalAlpha = 0.12 + 0.88 * Math.sqrt(n / most);
      const [top, low] = [Math.round(h - (row + 1) * tall), Math.round(h - row * tall)];
      pen.fillRect(Math.round(x), top, Math.max(1, Math.round(end) - Math.round(x)), low - top);
    }
  });
  pen.globalAlpha = 1;
  // The line of the 99th percentile.
  pen.strokeStyle = color("--dirty");
  pen.lineWidth = 1.5;
  pen.beginPath();
  let drawing = false;
  for (const { x, end, buckets } of columns) {
    const p99 = quantile(buckets, 0.99);
    if (p99 === null) { drawing = false; continue; }
    if (!drawing) pen.moveTo(x, level(p99));
    pen.lineTo((x + end) / 2, level(p99));
    drawing = true;
  }
  pen.stroke();
  sayHeat(columns);
}
function sayHeat(columns) {
  const merged = new Map();
  for (const { buckets } of columns.slice(-WINDOW)) {
    for (const [upper, n] of buckets) merged.set(upper, (merged.get(upper) || 0) + n);
  }
  const recent = sorted([...merged]);
  const op = by("heat-op").selectedOptions[0].textContent;
  const quiet = `no ${op} in the last seconds`;
  const all = recent.reduce((sum, [, n]) => sum + n, 0);
  set(by("heat-text"), all
    ? `${op} of the last ${WINDOW} s: median ${micros(quantile(recent, 0.5))}, p99 ${micros(quantile(recent, 0.99))} (the line), p99.9 ${micros(quantile(recent, 0.999))}`
    : quiet);
  sayStages(all);
}
// What they waited for, on average.
function sayStages(all) {
  const [name, op] = [by("heat-volume").value, by("heat-op").value];
  const sums = new Map();
  if (all && past.length > 1) {
    const [[, before], [, now]] = [earlier(), past[past.length - 1]];
    for (const volume of now.volumes.filter((volume) => !name || volume.name === name)) {
      const old = named(before, volume.name);
      if (!old) continue;
      for (const stage of ["queue", "data", "cache", "store", "answer"]) {
        const grown = volume.latency[op][stage].sum_us - old.latency[op][stage].sum_us;
        sums.set(stage, (sums.get(stage) || 0) + Math.max(0, grown));
      }
    }
  }
  const whole = [...sums.values()].reduce((sum, us) => sum + us, 0);
  const parts = [...sums].filter(([, us]) => us >= whole / 200).sort((a, b) => b[1] - a[1]);
  set(by("heat-stages"), whole ? "they waited for: " + parts.map(([stage, us]) => `${stage} ${share(us, whole)}`).join(", ") : "\u00a0");
}

function show(status) {
  const now = performance.now() / 1000;
  if (instance && instance !== status.instance) past = [];
  past.push([now, status]);
  past = past.filter(([at]) => now - at <= SPAN + 2);
  const [from, before] = earlier();
  showHead(status);
  showNow(status, before, now - from);
  showVolumes(status, before, now - from);
  showSessions(status, before, now - from);
  chooseVolumes(status);
  drawHeat();
}

async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
  if (!answer.ok) throw new Error("HTTP " + answer.status);
  return answer.json();
}

function showLost(error) {
  if (lostAt === null) lostAt = Date.now();
  const since = heardAt === null ? "" : ` What is shown is from ${clock(heardAt)}.`;
  const seconds = Math.round((Date.now() - lostAt) / 1000);
  banner("bad", `The target has not answered for ${span(seconds)}.${since}`, "lost");
  set(by("state"), "lost");
  by("state").className = "badge bad";
  set(by("fresh"), "last try " + clock(Date.now()) + (error.message ? ": " + error.message : ""));
}

async function turn() {
  try {
    const status = await ask("/status.json");
    const report = await ask("/events?after=" + (status.instance === instance ? seen : 0));
    lostAt = null;
    heardAt = Date.now();
    show(status);
    showEvents(report.events);
    [seen, instance] = [report.last, report.instance];
    set(by("fresh"), "as of " + clock(heardAt));
  } catch (error) {
    showLost(error);
  }
  setTimeout(turn, STEP_MS);
}

by("heat-volume").addEventListener("change", drawHeat);
by("heat-op").addEventListener("change", drawHeat);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawHeat);
new ResizeObserver(drawHeat).observe(by("heat"));
turn();
