// The state of the target: title of the tab, badge, banner, warnings.
const STATES = {
  "serving": ["serving", "ok"],
  "lost-writes": ["writes lost", "bad"],
  "full": ["store full", "bad"],
  "store-errors": ["store fails", "bad"],
  "store-fault": ["store fault", "bad"],
  "draining": ["draining", "warn"],
  "upgrading": ["upgrading", "warn"],
  "state-dir": ["state_dir fails", "bad"],
  "listener-down": ["listener down", "bad"],
  "volume-away": ["volume missing", "warn"],
};
// How a target ended that said so.
const ENDS = {
  drained: ["drained", "warn", "The target drained and stopped"],
  stopped: ["stopped", "bad", "The target stopped"],
  upgraded: ["upgrading", "warn", "The target makes room for another program"],
  failed: ["failed", "bad", "The target failed"],
};
const NO_WORD = "it crashed, was killed, or its host or the network is down";
let targetName = "rblk target";

function showState(label, kind) {
  const badge = by("state");
  set(badge, label);
  badge.className = "badge " + kind;
  const title = kind === "ok" ? `${targetName} – rblk target` : `● ${label.toUpperCase()} — rblk ${targetName}`;
  if (document.title !== title) document.title = title;
}
function banner(kind, text, state) {
  const strip = by("banner");
  strip.hidden = kind === null;
  strip.className = kind || "";
  set(strip, text);
  document.documentElement.dataset.state = state;
}
function showHead(status) {
  targetName = status.name;
  set(by("name"), status.name);
  const [label, kind] = STATES[status.condition] || [status.condition || "serving", "warn"];
  showState(label, kind);
  const access = status.insecure ? "everybody may do everything" : status.auth === "required" ? "hosts prove their keys" : "no authentication";
  set(by("about"), `rblk ${status.version}, up ${span(status.uptime_s)}, ${access}`);
  if (status.drain) {
    const left = status.drain.left_ms > 0 ? `ended in ${Math.ceil(status.drain.left_ms / 1000)} s at the latest` : "ending";
    const why = status.drain.upgrade ? "makes room for another program" : "is draining";
    banner("warn", `This target ${why}: sessions left: ${status.drain.sessions}, ${left}.`, "draining");
  } else {
    banner(null, "", "live");
  }
  showWarnings(status.warnings || []);
}
// The lines that `rblk-target status` shows as WARN.
function showWarnings(list) {
  const box = by("warnings");
  by("warnings-card").hidden = list.length === 0;
  while (box.children.length > list.length) box.lastElementChild.remove();
  while (box.children.length < list.length) box.append(node("li"));
  list.forEach((text, at) => set(box.children[at], text));
}
function showLost(error) {
  if (lostAt === null) lostAt = Date.now();
  const since = heardAt === null ? "" : ` What is shown is from ${clock(heardAt)}.`;
  const seconds = Math.round((Date.now() - lostAt) / 1000);
  if (farewell) {
    const [label, kind, words] = ENDS[farewell.end] || ["ended", "warn", "The target ended"];
    banner(kind, `${words} at ${clock(farewell.at)}: ${farewell.text}.${since}`, "lost");
    showState(label, kind);
  } else {
    // Whoever ends in good order says so at once.
    const why = seconds < 2 ? "" : `: ${NO_WORD}`;
    banner("bad", `The target has not answered for ${span(seconds)}${why}.${since}`, "lost");
    showState("lost", "bad");
  }
  document.documentElement.dataset.end = farewell ? farewell.end : "unknown";
  set(by("fresh"), "last try " + clock(Date.now()) + (error.message ? ": " + error.message : ""));
  drawAll();
}
