// Events by kind: however many there are of one kind, they drive out none of another.
const KINDS_BAD = new Set(["lost-writes", "store-error", "store-fault", "state-dir", "device", "no-answer"]);
const KINDS_CALM = new Set(["connect", "resume", "leave", "drain", "upgrade", "start", "end"]);
const KEPT_PER_KIND = 64;
const grade = (kind) => (KINDS_BAD.has(kind) ? "bad" : KINDS_CALM.has(kind) ? "kind" : "warn");
const RANKS = ["bad", "warn", "kind"];

// By kind: its parts of the document, how many there were, and when the last one was.
const groups = new Map();

function groupOf(kind) {
  if (groups.has(kind)) return groups.get(kind);
  const [details, summary, list] = [node("details"), node("summary"), node("ol")];
  const [word, number, at, last] = [node("span", "kind " + grade(kind), kind), node("span", "count"), node("time"), node("span", "last")];
  summary.append(word, number, at, last);
  details.append(summary, list);
  const group = { kind, details, list, number, at, last, latest: 0, seen: 0 };
  groups.set(kind, group);
  return group;
}
function addEvent(event) {
  const group = groupOf(event.kind);
  const [item, at, text] = [node("li"), node("time", "", clock(event.unix_ms)), node("span")];
  at.dateTime = new Date(event.unix_ms).toISOString();
  at.title = at.dateTime;
  const who = [event.host, event.volume].filter(Boolean).join(", ");
  if (who) text.append(node("b", "", who), ": ");
  text.append(event.text, event.left_out ? ` (${event.left_out} more before it)` : "");
  item.append(at, text);
  group.list.prepend(item);
  while (group.list.children.length > KEPT_PER_KIND) group.list.lastElementChild.remove();
  group.seen += 1 + (event.left_out || 0);
  group.latest = event.unix_ms;
  set(group.at, clock(event.unix_ms));
  set(group.last, text.textContent);
}
// Something that the page saw itself.
const ownEvent = (kind, text, unix_ms) => addEvent({ kind, text, unix_ms });

// `totals`: how many there were in this run. The target keeps the last ones of each kind.
function showEvents(list, totals) {
  list.forEach(addEvent);
  const totalOf = new Map((totals || []).map(({ kind, total }) => [kind, total]));
  for (const { kind, number, seen } of groups.values()) set(number, count(Math.max(seen, totalOf.get(kind) || 0)));
  const rank = ({ kind }) => RANKS.indexOf(grade(kind));
  const order = [...groups.values()].sort((a, b) => rank(a) - rank(b) || b.latest - a.latest);
  const box = by("events");
  if (order.some(({ details }, at) => box.children[at] !== details)) {
    box.replaceChildren(...order.map(({ details }) => details));
  }
  box.nextElementSibling.hidden = order.length > 0;
  if (list.length) filterEvents();
}
function filterEvents() {
  const [words, trouble] = [by("events-filter").value.trim().toLowerCase(), by("events-trouble").checked];
  let shown = 0;
  for (const { kind, details, list } of groups.values()) {
    let found = 0;
    for (const item of list.children) {
      item.hidden = words !== "" && !(kind + " " + item.textContent).toLowerCase().includes(words);
      found += item.hidden ? 0 : 1;
    }
    details.hidden = found === 0 || (trouble && grade(kind) === "kind");
    shown += details.hidden ? 0 : 1;
    if (words !== "") details.open = !details.hidden;
  }
  by("events-none").hidden = groups.size === 0 || shown > 0;
}
