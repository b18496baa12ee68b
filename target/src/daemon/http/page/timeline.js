// What the volumes did in each second, as the target remembers it: also what it did before the page
// was opened. Times are those of the target's clock, in milliseconds.
const SPAN = 120;
// What is left of a long silence in the charts, so that it does not drive the past out.
const GAP_MS = 8000;

// Of all runs that the page saw, oldest first: { from, to, volumes }.
let moments = [];
// When runs began: { at, text }. When nobody answered: { from, to }.
let marks = [];
let gaps = [];
// How far the target's clock is ahead of ours, and the last time that it told.
let skew = 0;
let toldAt = 0;

function remember(report) {
  toldAt = report.now_unix_ms;
  skew = report.now_unix_ms - Date.now();
  for (const { unix_ms, lasted_ms, volumes } of report.moments) {
    moments.push({ from: unix_ms - lasted_ms, to: unix_ms, volumes });
  }
  const first = place(toldAt) - (SPAN + 5) * 1000;
  moments = moments.filter(({ to }) => place(to) > first);
  marks = marks.filter(({ at }) => place(at) > first);
  gaps = gaps.filter(({ to }) => place(to) > first);
}
// Where a time is in the charts: a long silence counts for GAP_MS.
function place(ms) {
  let at = ms;
  for (const { from, to } of gaps) {
    const more = to - from - GAP_MS;
    if (more <= 0) continue;
    if (ms <= from) at += more;
    else if (ms < to) at += more * (1 - (ms - from) / (to - from));
  }
  return at;
}
// The seconds of a chart, with the sums of the volumes that are wanted.
function seconds(volume) {
  return moments.map(({ from, to, volumes }) => {
    return { from, to, volumes: volume ? volumes.filter(({ name }) => name === volume) : volumes };
  });
}
