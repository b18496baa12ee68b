// The map of latencies: a column for each second, two rows for each power of two, from 1 µs to
// 16 s. And the lines of reads and writes.
const OCTAVES = 24;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function chooseVolumes(status) {
  const select = by("heat-volume");
  const names = ["", ...status.volumes.map((volume) => volume.name)];
  const shown = [...select.options].map((option) => option.value);
  if (names.join("\n") === shown.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => {
    const option = node("option", "", name || "all");
    option.value = name;
    return option;
  }));
  select.value = names.includes(chosen) ? chosen : "";
}

function sheet(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  return { pen, width, height };
}
// Where a time is, in points from the left.
const across = (left, width) => (ms) => left + width * (1 - (place(toldAt) - place(ms)) / (SPAN * 1000));

// Silences and starts, behind what is drawn.
function drawBreaks(pen, at, left, height, said) {
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "top";
  for (const { from, to } of gaps) {
    const [x, end] = [Math.max(left, at(from)), at(to)];
    if (end <= left) continue;
    pen.fillStyle = color("--bad-soft");
    pen.fillRect(x, 0, end - x, height);
    if (!said) continue;
    pen.fillStyle = color("--bad");
    pen.textAlign = x > left + 130 ? "right" : "left";
    pen.fillText(`no answer, ${span((to - from) / 1000)}`, x > left + 130 ? x - 4 : end + 4, 24);
  }
  pen.strokeStyle = color("--muted");
  pen.setLineDash([3, 3]);
  pen.lineWidth = 1;
  for (const { at: ms, text } of marks) {
    const x = Math.round(at(ms)) + 0.5;
    if (x < left) continue;
    pen.beginPath();
    pen.moveTo(x, 0);
    pen.lineTo(x, height);
    pen.stroke();
    if (!said) continue;
    pen.fillStyle = color("--muted");
    pen.textAlign = x > left + 160 ? "right" : "left";
    pen.fillText(text, x > left + 160 ? x - 4 : x + 4, 8);
  }
  pen.setLineDash([]);
}

function drawScale(pen, left, width, h, height, level) {
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
  const last = lostAt === null ? "now" : clock(toldAt - skew);
  for (const [ago, align] of [[120, "left"], [60, "center"], [0, "right"]]) {
    pen.textAlign = align;
    pen.fillText(ago ? `${ago} s ago` : last, left + (width - left) * (1 - ago / SPAN), height - 1);
  }
}

function drawHeat() {
  const { pen, width, height } = sheet(by("heat"));
  if (!width) return;
  const [left, h] = [56, height - 20];
  const level = (us) => h - (Math.log2(Math.max(us, 1)) / OCTAVES) * h;
  const at = across(left, width - left);
  drawBreaks(pen, at, left, h, true);
  drawScale(pen, left, width, h, height, level);
  const op = by("heat-op").value;
  const columns = seconds(by("heat-volume").value).map(({ from, to, volumes }) => {
    const buckets = sorted(volumes.flatMap((volume) => volume[op].map((bucket) => [...bucket])));
    return { x: Math.max(at(from), left), end: at(to), to, buckets };
  }).filter(({ end }) => end > left);
  drawCells(pen, columns, h);
  drawLine(pen, columns, level);
  sayHeat(columns);
}
function drawCells(pen, columns, h) {
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
  columns.forEach(({ x, end }, index) => {
    for (const [row, n] of cells[index]) {
      pen.globalAlpha = 0.12 + 0.88 * Math.sqrt(n / most);
      const [top, low] = [Math.round(h - (row + 1) * tall), Math.round(h - row * tall)];
      pen.fillRect(Math.round(x), top, Math.max(1, Math.round(end) - Math.round(x)), low - top);
    }
  });
  pen.globalAlpha = 1;
}
// The line of the 99th percentile.
function drawLine(pen, columns, level) {
  pen.strokeStyle = color("--dirty");
  pen.lineWidth = 1.5;
  pen.beginPath();
  let before = null;
  for (const { x, end, buckets } of columns) {
    const p99 = quantile(buckets, 0.99);
    if (p99 === null) { before = null; continue; }
    if (before === null || x - before > 4) pen.moveTo(x, level(p99));
    pen.lineTo((x + end) / 2, level(p99));
    before = end;
  }
  pen.stroke();
}
function sayHeat(columns) {
  const merged = new Map();
  for (const { buckets } of columns.filter(({ to }) => toldAt - to < WINDOW * 1000)) {
    for (const [upper, n] of buckets) merged.set(upper, (merged.get(upper) || 0) + n);
  }
  const recent = sorted([...merged]);
  const op = by("heat-op").selectedOptions[0].textContent;
  const all = recent.reduce((sum, [, n]) => sum + n, 0);
  set(by("heat-text"), all
    ? `${op} of the last ${WINDOW} s: median ${micros(quantile(recent, 0.5))}, p99 ${micros(quantile(recent, 0.99))} (the line), p99.9 ${micros(quantile(recent, 0.999))}`
    : `no ${op} in the last seconds`);
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

// Reads or writes per second over the span of the map.
function drawRates(key) {
  const { pen, width, height } = sheet(by(key + "-line"));
  if (!width) return;
  const at = across(0, width);
  drawBreaks(pen, at, 0, height, false);
  const bars = seconds("").map(({ from, to, volumes }) => {
    const n = volumes.reduce((sum, volume) => sum + volume[key], 0);
    return { x: at(from), end: at(to), rate: (1000 * n) / Math.max(1, to - from) };
  }).filter(({ end }) => end > 0);
  const peak = bars.reduce((most, { rate }) => Math.max(most, rate), 0);
  pen.fillStyle = color("--accent");
  for (const { x, end, rate } of bars) {
    const tall = Math.max(rate > 0 ? 1 : 0, (rate / peak) * (height - 1));
    pen.fillRect(Math.round(x), height - 1 - tall, Math.max(1, Math.round(end) - Math.round(x)), tall);
  }
  pen.fillStyle = color("--line");
  pen.fillRect(0, height - 1, width, 1);
  set(by(key + "-peak"), peak ? `at most ${count(peak)}/s in two minutes` : "none in two minutes");
}
function drawAll() {
  drawHeat();
  drawRates("reads");
  drawRates("writes");
}
