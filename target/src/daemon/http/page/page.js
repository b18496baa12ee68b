// Asks the target once a second, and shows what changed. All numbers that grow are counters since
// the start of the target: what is shown is what they grew by. Another run of the target is told,
// and wipes out nothing that the page knows of the runs before.
const STEP_MS = 1000;
const PATIENCE_MS = 4000;
const WINDOW = 5;

// The answers of the last seconds, of this run, oldest first: [seconds, status].
let past = [];
let instance = "";
let lastEvent = 0;
let lastMoment = 0;
let lostAt = null;
let heardAt = null;
// The last word of the run, if it had one: { end, text, at }.
let farewell = null;

// The answer that is a few seconds older than the last, for rates and quantiles.
const earlier = () => past[Math.max(0, past.length - 1 - WINDOW)];

function show(status) {
  const now = performance.now() / 1000;
  past.push([now, status]);
  past = past.slice(-1 - WINDOW);
  const [from, before] = earlier();
  showHead(status);
  showNow(status, before, now - from);
  showVolumes(status, before, now - from);
  showSessions(status, before, now - from);
  showFacts(status);
  chooseVolumes(status);
  drawAll();
}

// The target answers again, or for the first time: what was in between is an event, and stays in
// the charts.
function tellReturn(status) {
  const isNew = status.instance !== instance;
  if (lostAt !== null && heardAt !== null) {
    const away = Date.now() - heardAt;
    gaps.push({ from: heardAt + skew, to: isNew ? Math.max(status.started_unix_ms, heardAt + skew) : Date.now() + skew });
    if (!isNew) ownEvent("no-answer", `the target did not answer for ${span(away / 1000)}, and was not restarted`, Date.now() + skew);
  }
  if (!isNew) return;
  const started = status.started_unix_ms;
  const upgraded = status.upgrade && !status.upgrade.failed;
  const how = upgraded ? `version ${status.version} took over from ${status.upgrade.from_version}` : `rblk ${status.version} started`;
  let before = "";
  if (instance !== "") {
    const ended = farewell ? `${farewell.end}: ${farewell.text}` : "ended without a word: it crashed, or was killed";
    before = upgraded ? "" : `; the run before ${lostAt === null && !farewell ? "ended while this page slept" : ended}`;
  }
  ownEvent("start", how + before, started);
  if (before.includes("without a word")) ownEvent("no-answer", `the target ended without a word, and was away for ${span((Date.now() - heardAt) / 1000)}`, started);
  marks.push({ at: started, text: upgraded ? "upgrade" : instance === "" ? "start" : "restart" });
  [past, lastEvent, lastMoment, farewell] = [[], 0, 0, null];
  instance = status.instance;
}

async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
  if (!answer.ok) throw new Error("HTTP " + answer.status);
  return answer.json();
}

async function turn() {
  try {
    const status = await ask("/status.json");
    const known = status.instance === instance;
    const [events, report] = await Promise.all([
      ask("/events?after=" + (known ? lastEvent : 0)),
      ask("/past?after=" + (known ? lastMoment : 0)),
    ]);
    // Else it was restarted between the questions.
    if (events.instance === status.instance && report.instance === status.instance) {
      tellReturn(status);
      [lostAt, heardAt] = [null, Date.now()];
      remember(report);
      show(status);
      showEvents(events.events, status.events);
      [lastEvent, lastMoment] = [events.last, report.last];
      set(by("fresh"), "as of " + clock(heardAt));
    }
  } catch (error) {
    showLost(error);
  }
  setTimeout(turn, STEP_MS);
}

// Waits for the last word of the target, all the time.
async function listen() {
  const began = Date.now();
  let pause = STEP_MS;
  try {
    const answer = await fetch("/farewell", { cache: "no-store" });
    const word = answer.ok ? await answer.json() : null;
    if (word) {
      farewell = { ...word, at: Date.now() };
      ownEvent("end", `the target ${word.end}: ${word.text}`, Date.now() + skew);
      showEvents([], past.length ? past[past.length - 1][1].events : []);
      showLost({});
      pause = 3 * STEP_MS;
    } else {
      // There was no place to wait.
      pause = Date.now() - began < STEP_MS ? 5 * STEP_MS : 0;
    }
  } catch {
    // It says nothing any more; the next turn tells.
  }
  setTimeout(listen, pause);
}

by("heat-volume").addEventListener("change", drawHeat);
by("heat-op").addEventListener("change", drawHeat);
by("events-filter").addEventListener("input", filterEvents);
by("events-trouble").addEventListener("change", filterEvents);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
new ResizeObserver(drawAll).observe(by("heat"));
turn();
listen();
