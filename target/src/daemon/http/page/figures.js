"use strict";
// Parts of the document, and numbers for people. Names and texts are put in as text, never as markup.
const by = (id) => document.getElementById(id);
const set = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const node = (tag, name, text) => {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text) made.textContent = text;
  return made;
};

function count(n) {
  if (n < 9995) return n < 9.95 && n % 1 ? n.toFixed(1) : Math.round(n).toString();
  if (n < 999500) return (n / 1e3).toFixed(n < 99950 ? 1 : 0).replace(".0", "") + "k";
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
  return m ? m + " min" : Math.round(seconds) + " s";
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
const sorted = (buckets) => buckets.sort((a, b) => (a[0] === null) - (b[0] === null) || a[0] - b[0]);
