"""prototype"""
import dataclasses, os
ZIG="zig" in os.environ.get("RES","")
AHEAD=3
ENV = dict(kv.split('=') for kv in os.environ.get('RES', '').split(',') if kv)

@dataclasses.dataclass(frozen=True)
class Task:
    column: int
    slot: int
    first: int
    count: int  # negative: in pieces
    awaits: int
    received: int  # before: arrivals received so far (exclusive end) before this task
    receives: int
    fetches: int
    into: int
    place: int
    waits: int

@dataclasses.dataclass(frozen=True)
class Rates:
    multiply: float
    product: float
    task: float
    load: float
    latency: float
    store: float
    trip: float
    hop_latency: float
    entry: float
    own: float

def schedule(arrivals, own, columns, slots, most, room, pieces, rates):
    G, T, S = arrivals, columns, slots
    mem = own * rates.own
    arrive = [(i + 1) * rates.own + rates.latency for i in range(own)]
    done = [0] * T
    where = {}  # tile -> slot
    ready = {}
    begun = {}
    free = list(range(S))
    link = rates.entry
    loads = []
    awaited = set()
    now = 0.0
    recv = 0
    tasks = []
    left = {}
    place = 0

    def receive():
        nonlocal recv, link
        while recv < len(arrive) and arrive[recv] <= now:
            recv += 1
            if recv <= G - own:
                link = max(link, now) + rates.trip
                arrive.append(link + rates.hop_latency)

    def put(q):
        nonlocal place, now
        first = place if place + q <= room else 0
        place = first + q
        there = [slot for slot in range(first, first + q) if slot in left]
        for slot in there:
            now = max(now, left.pop(slot))
        return first, len(there)

    def load(t):
        nonlocal mem
        s = free.pop(0)
        where[t] = s
        begun[t] = max(mem, now)
        mem = begun[t] + rates.load
        ready[t] = mem + rates.latency
        awaited.discard(t)
        return s

    def tile(p):
        if not ZIG: return p % T
        p %= 2 * T
        return p if p < T else 2 * T - 1 - p

    def nexts(p, count):
        res, i = [], p
        while len(res) < min(count, T) and i < p + 4 * T:
            if done[tile(i)] < G and tile(i) not in res:
                res.append(tile(i))
            i += 1
        return res

    for t in nexts(0, min(2, S)):
        loads.append((t, load(t)))
    for i in range(own):
        now = max(now, arrive[i], rates.entry)
        receive()
    p = 0
    prev_recv = own
    while min(done) < G:
        t = tile(p)
        if done[t] >= G:
            p += 1
            continue
        receive()
        if done[t] >= recv:
            if any(d < recv for d in done):
                p += 1
                continue
            now = max(now, arrive[recv])
            continue
        # fetch at most one tile for the visits to come
        fetch = -1
        into = 0
        want = nexts(p, min(S, AHEAD))
        for u in want:
            if u not in where:
                if not free:
                    victims = [x for x in where if x not in want]
                    if victims:
                        v = max(victims, key=lambda x: nexts(p, T).index(x) if x in nexts(p, T) else T)
                        free.append(where.pop(v))
                if free:
                    fetch = u
                    into = load(u)
                break
        if t not in where:
            raise AssertionError("not loaded")
        if ENV.get("F") and ready[t] > now + rates.multiply:
            others = [x for x in where if ready[x] <= now and done[x] < recv]
            if others:
                t = max(others, key=lambda x: recv - done[x])
        av = recv - done[t]
        inpieces = pieces > 1 and t not in awaited and ready[t] - rates.load / pieces > now
        now += rates.task
        if inpieces:
            q = min(av, most)
            first, waits = put(q)
            for i in range(pieces):
                now = max(now, begun[t] + (ready[t] - begun[t]) * (i + 1) / pieces)
                now += q * (rates.multiply / pieces + rates.product)
            mem = max(mem, now) + q * rates.store
        else:
            now = max(now, ready[t])
            q = max(x for x in (1, 2, 4, 8, 16) if x <= min(av, 2 * most))
            first, waits = put(q)
            now += q * rates.multiply + -(-q // most) * rates.product
            mem = max(mem, now) + q * rates.store
        left.update(dict.fromkeys(range(first, first + q), mem + rates.latency))
        tasks.append(Task(t, where[t], done[t], -q if inpieces else q, int(not inpieces and t not in awaited), prev_recv, recv - prev_recv, fetch, into, first, waits))
        awaited.add(t)
        prev_recv = recv
        done[t] += q
        receive()
        if done[t] >= G:
            free.append(where.pop(t))
            p += t == tile(p)
        elif t == tile(p):
            av = recv - done[t]
            lazy = av < most and recv < G and any(x != t and recv - done[x] >= most and ready[x] <= now for x in where)
            if av == 0 or lazy:
                p += 1
    return tasks, loads, max([now, *left.values()])
