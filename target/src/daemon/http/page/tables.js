// The figures of now, and the tables.
// Per second of the last few seconds, as the target remembers them.
function lately(key) {
  const of = seconds("").filter(({ to }) => toldAt - to < WINDOW * 1000);
  const lasted = of.reduce((sum, { from, to }) => sum + to - from, 0);
  const sum = of.reduce((sum, { volumes }) => sum + volumes.reduce((n, volume) => n + volume[key], 0), 0);
  return lasted ? (1000 * sum) / Math.max(lasted, 1000) : 0;
}
function showNow(status, before, seconds) {
  const per = (key) => (seconds > 0 ? (status.total[key] - before.total[key]) / seconds : lately(key));
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

// A thin file takes space of its file system as hosts write to it.
function sizeCell(volume) {
  const { room, read_only, size_bytes } = volume;
  const little = room && !read_only && room.unallocated_bytes > 0 && room.free_bytes < room.total_bytes / 10;
  if (!little) return [bytes(size_bytes)];
  const left = room.free_bytes ? `room for ${bytes(Math.min(room.free_bytes, room.unallocated_bytes))}` : "no room";
  return [`${bytes(size_bytes)}, ${left}`, room.free_bytes < room.unallocated_bytes ? "warn" : ""];
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
      sizeCell(volume),
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

// Lists of a name and what is said of it.
function facts(id, list) {
  const box = by(id);
  while (box.children.length > list.length) box.lastElementChild.remove();
  while (box.children.length < list.length) {
    const item = node("li");
    item.append(node("span"), node("span"));
    box.append(item);
  }
  list.forEach(([name, text, kind], at) => {
    const [left, right] = box.children[at].children;
    set(left, name);
    set(right, text);
    right.className = kind || "";
  });
}
function showFacts(status) {
  facts("listeners", status.listen.map((address) => {
    const down = status.listen_down.find((other) => other.address === address);
    return down ? [address, `down for ${span(down.down_s)}: ${down.why}`, "bad"] : [address, "up", "ok"];
  }));
  facts("devices", status.devices.flatMap((device) => {
    const ports = device.ports || [];
    const worst = device.transport.startsWith("soft") ? "" : "bad";
    const of = ports.map(({ name, state, rate, interfaces }) => {
      const where = (interfaces || []).join(", ");
      return ["\u2003" + (where ? `port ${name} (${where})` : name), [state, rate].filter(Boolean).join(", "), state === "active" ? "ok" : worst];
    });
    return [[device.name === "soft" ? "TCP" : device.name, device.transport + (device.io.errors ? `, ${count(device.io.errors)} errors` : "")], ...of];
  }));
  facts("usage", usage(status));
}
function usage(status) {
  const { sessions, sessions_max, connections, files, files_max, memory_bytes, memory_max_bytes } = status.usage;
  const { dirty_bytes, dirty_max_bytes } = status.total;
  const full = (part, whole) => (part >= 0.95 * whole ? "bad" : part >= 0.8 * whole ? "warn" : "");
  const list = [["Sessions", `${count(sessions)} of ${count(sessions_max)}`, full(sessions, sessions_max)], ["Connections", count(connections)]];
  if (memory_bytes) {
    const of = memory_max_bytes ? ` of ${bytes(memory_max_bytes)}` : "";
    list.push(["Memory", bytes(memory_bytes) + of, of ? full(memory_bytes, memory_max_bytes) : ""]);
  }
  if (files) list.push(["Open files", `${count(files)} of ${count(files_max)}`, full(files, files_max)]);
  if (dirty_max_bytes) list.push(["Dirty data", `${bytes(dirty_bytes)} of ${bytes(dirty_max_bytes)}`, full(dirty_bytes, dirty_max_bytes)]);
  return list;
}
