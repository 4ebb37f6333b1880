// Softmax attention of softmax.h to bands, segments, listed blocks and sorted chunks of keys, shared between threads.
// Compiled once per instruction set, with LINTRA_ISA naming the namespace.
#include "softmax_gradients.h"

#include "kernel.h"
#include "parallel.h"

LINTRA_DECLARE(LINTRA_ISA)

namespace lintra {
namespace LINTRA_ISA {

constexpr double kParallelWork = 1 << 18;  // multiply-adds below which waking a thread costs more than it saves
constexpr i64 kTasks = 8;                  // parts of a backward pass where sequences and heads are few
constexpr i64 kPartTiles = 8;              // that such a part has at least
constexpr i64 kFar = i64(1) << 40;         // further than any key

// One head of keys of one sequence; with a dilation, of the tokens of one class, `step` apart.
struct Item {
  i64 row, group;
  i64 query, queries, key, keys, step;  // the first query and key, and how many there are
  i64 lead;                             // the place of the first query among the keys
  i64 unit, tiles_per_unit, tiles;      // queries whose tiles share their keys, and all tiles
  i64 round;
  const i64* order;  // of the tokens, absent: as they lie
};

// Rows of a tile, counted from the first query of the item.
struct TileRows {
  i64 number, first, count;  // `number`: of the unit
};

// Keys that a tile reads: those from..to where low <= place of the query - place of the key <= high.
struct Piece {
  i64 from, to, low, high;
};

template <class T>
struct SoftmaxCall {
  const lintra_softmax& call;
  static constexpr i64 kSize = sizeof(T), W = kLanes<T>;

  i64 heads() const { return call.h / call.g; }
  i64 items() const { return call.b * call.dilation * call.g; }
  i64 d_step() const { return round_up(call.d, W); }
  i64 e_step() const { return round_up(call.e, W); }

  Item item(i64 i, i64 round = 0) const {
    Item x;
    x.round = round;
    x.order = nullptr;
    x.group = i % call.g;
    const i64 residue = i / call.g % call.dilation;
    x.row = i / call.g / call.dilation;
    x.step = call.dilation;
    x.key = residue;
    x.keys = residue < call.s ? (call.s - residue + x.step - 1) / x.step : 0;
    const i64 lead = call.kind == LINTRA_BAND ? call.s - call.t : 0;
    x.query = ((residue - lead) % x.step + x.step) % x.step;
    x.queries = x.query < call.t ? (call.t - x.query + x.step - 1) / x.step : 0;
    x.lead = (lead + x.query - residue) / x.step;
    if (call.kind == LINTRA_SORTED) {
      x.order = call.token + ((x.row * call.h + x.group) * call.rounds + round) * places();
      const char* visible = call.visible.data ? call.visible.data + x.row * call.visible.b : nullptr;
      x.keys = 0;
      for (i64 j = 0; j < call.t; ++j) x.keys += !visible || visible[j * call.visible.t];
      x.queries = x.keys;
    }
    x.unit = call.kind == LINTRA_BAND || call.unit > x.queries ? x.queries : call.unit;
    x.tiles_per_unit = (x.unit * heads() + kTile - 1) / kTile;
    x.tiles = x.queries ? (x.queries + x.unit - 1) / x.unit * x.tiles_per_unit : 0;
    return x;
  }

  // Of LINTRA_SORTED: tokens and padding in whole chunks, and how often the tokens are gone through.
  i64 places() const { return round_up(call.t, call.unit); }
  i64 rounds() const { return call.kind == LINTRA_SORTED ? call.rounds : 1; }

  TileRows rows(const Item& x, i64 tile) const {
    const i64 number = tile / x.tiles_per_unit, begin = number * x.unit;
    const i64 end = begin + x.unit < x.queries ? begin + x.unit : x.queries;
    const i64 first = begin * heads() + tile % x.tiles_per_unit * kTile;
    return {number, first, clamp(end * heads() - first, 0, kTile)};
  }

  TokenRows token_rows(const lintra_tensor& tensor, const Item& x, i64 first, i64 head, i64 heads, i64 width) const {
    const i64 size = element_size(call.dtype);
    return {tensor.data + (x.row * tensor.b + first * tensor.t + head * tensor.h) * size, x.step * tensor.t * size,
            tensor.h * size, heads, width, call.dtype, x.order};
  }
  // Of a contiguous tensor in the dtype of sums, [b t h width].
  TokenRows sums(const void* data, const Item& x, i64 width) const {
    const i64 first = ((x.row * call.t + x.query) * call.h + x.group * heads()) * width;
    return {(const char*)data + first * kSize, x.step * call.h * width * kSize, width * kSize, heads(), width,
            kSize == 8 ? LINTRA_FLOAT64 : LINTRA_FLOAT32, x.order};
  }
  // Of a contiguous gradient [b n heads width].
  TokenRows gradient(const void* data, const Item& x, i64 n, i64 first, i64 head, i64 all, i64 heads, i64 width) const {
    const i64 size = element_size(call.dtype);
    return {(const char*)data + ((x.row * n + first) * all + head) * width * size, x.step * all * width * size,
            width * size, heads, width, call.dtype};
  }

  // Calls f(piece) for what the rows of a tile read.
  template <class F>
  void each_piece(const Item& x, const TileRows& rows, F&& f) const {
    const i64 begin = rows.number * x.unit;
    if (call.kind == LINTRA_BAND) {
      const i64 first = x.lead + rows.first / heads(), last = x.lead + (rows.first + rows.count - 1) / heads();
      f(Piece{clamp(first - call.before, 0, x.keys), clamp(last + call.after + 1, 0, x.keys), -call.after, call.before});
    } else if (call.kind == LINTRA_SEGMENTS) {
      f(Piece{clamp(begin - call.before, 0, x.keys), clamp(begin + x.unit + call.after, 0, x.keys), -kFar, kFar});
    } else if (call.kind == LINTRA_SORTED) {
      const i64 chunks = (x.keys + call.unit - 1) / call.unit, width = call.before + 1 + call.after;
      for (i64 slot = 0; slot < width; ++slot) {
        i64 chunk = rows.number + slot - call.before;
        if (call.rule & LINTRA_WRAP) {
          if (slot == chunks) break;  // those before are all chunks, each once
          chunk = (chunk % chunks + chunks) % chunks;
        }
        const i64 first = chunk * call.unit;
        if (chunk >= 0 && chunk < chunks) f(Piece{first, clamp(first + call.unit, 0, x.keys), -kFar, kFar});
      }
    } else {
      for (i64 i = 0; i < call.entries; ++i) {
        const auto place = [&](const lintra_tensor& list) { return x.row * list.b + rows.number * list.t + x.group * list.h + i; };
        const i64 first = ((const i64*)call.blocks.data)[place(call.blocks)] * call.unit;
        if (call.listed.data[place(call.listed)]) f(Piece{first, first + call.unit, -kFar, kFar});
      }
      if (!call.own.data) return;
      const i64 own = ((const i64*)call.own.data)[x.row * call.own.b + rows.number * call.own.t] * call.unit;
      f(Piece{own, own + call.unit, begin - own, kFar});
    }
  }

  // Calls f(sight, first key, facts about the keys) for every tile of keys that a tile of rows sees; `ahead`
  // is given the rows that come next.
  template <class F>
  void each_tile(const Item& x, const TileRows& rows, KeyRows<T>& keys, Ahead& ahead, F&& f) const {
    ahead.next = rows.first + rows.count;
    ahead.end = clamp(ahead.next + kTile, 0, x.queries * heads());
    each_piece(x, rows, [&](const Piece& piece) {
      for (i64 first = piece.from; first < piece.to; first += kTile) {
        const i64 end = first + kTile < piece.to ? first + kTile : piece.to;
        const int known = keys.need(first, end);
        Sight sight = {rows.count, end - first, heads(), rows.first % heads(), 0, piece.low, piece.high, nullptr};
        sight.delta = x.lead + rows.first / heads() - first;
        if (known & KeyRows<T>::kHidden) {
          sight.hidden = keys.hidden + first;
          if (!memchr(sight.hidden, 0, size_t(end - first))) continue;
        }
        f(sight, first, known);
      }
    });
  }

  typedef SeenSorted<T> Sorted;
  typename Sorted::Rule rule(const Item& x) const {
    const auto has = [&](i64 flag) { return (call.rule & flag) != 0; };
    const i64 chunks = x.keys ? (x.keys + call.unit - 1) / call.unit : 1, width = call.before + 1 + call.after;
    const bool wrap = has(LINTRA_WRAP);
    return {x.round,
            has(LINTRA_EXACT_UNION) ? call.rounds : 1,
            chunks,
            wrap ? call.before % chunks : call.before,
            wrap && width > chunks ? chunks : width,
            has(LINTRA_CAUSAL),
            has(LINTRA_SEE_SELF),
            has(LINTRA_ACROSS_BUCKETS),
            wrap};
  }
  // What the rule looks at of the tokens at `count` places from `first` on.
  void describe(const Item& x, i64 first, i64 count, typename Sorted::Tokens& to) const {
    const i64 head = (x.row * call.h + x.group) * call.rounds * places();
    for (i64 j = 0; j < count; ++j) {
      const i64 token = x.order[first + j];
      to.token[j] = typename Sorted::Int(token);
      for (i64 i = 0; i < call.rounds; ++i) {
        to.place[i][j] = call.place[head + i * places() + token];
        to.bucket[i][j] = call.bucket[head + i * places() + token];
      }
    }
  }

  // Calls f(what makes a rule of the rows from one on) with the rule for a tile of rows and one of keys.
  template <class F>
  void with_rule(const Item& x, const Sight& sight, const typename Sorted::Rule& rule, typename Sorted::Tokens* both,
                 i64 first, F&& f) const {
    if (x.order) {
      describe(x, first, sight.keys, both[1]);
      f([&](i64 row) { return Sorted{rule, both[0], both[1], row}; });
    } else if (sight.hidden || !sight.full()) {
      f([&](i64 row) { return SeenBy<T>(sight, row); });
    } else {
      f([](i64) { return SeenByAll<T>{}; });
    }
  }

  KeyRows<T> key_rows(const Item& x, T*& memory, Ahead* ahead) const {
    KeyRows<T> keys;
    keys.ahead = ahead;
    keys.k = token_rows(call.k, x, x.key, x.group, 1, call.d);
    keys.v = token_rows(call.v, x, x.key, x.group, 1, call.e);
    ahead->tensors[0] = keys.k, ahead->tensors[1] = keys.v, ahead->count = 2;
    const i64 first = x.row * call.visible.b + x.key * call.visible.t;
    keys.visible = call.visible.data && !x.order ? call.visible.data + first : nullptr;
    keys.visible_step = x.step * call.visible.t;
    keys.count = x.keys;
    keys.d_step = d_step(), keys.e_step = e_step();
    keys.keys = memory, memory += key_count() * keys.d_step;
    keys.values = memory, memory += key_count() * keys.e_step;
    keys.state = (char*)memory;
    keys.hidden = keys.state + round_up(key_tiles(), 64);
    memory += flags_size();
    return keys;
  }
  i64 key_count() const { return (call.s + call.dilation - 1) / call.dilation + kBlockRows; }
  i64 key_tiles() const { return key_count() / kTile + 1; }
  i64 flags_size() const { return (round_up(key_tiles(), 64) + round_up(key_count(), 64)) / kSize; }
  i64 key_size() const { return key_count() * (d_step() + e_step()) + flags_size(); }

  i64 threads() const {
    double keys = double(call.before) + double(call.after) + double(call.unit * (call.entries + 1));
    if (keys > double(call.s)) keys = double(call.s);
    const double work = double(call.b) * double(call.t) * double(call.h) * double(call.d + call.e) * keys;
    return work < kParallelWork ? 1 : call.threads;
  }

  int forward(lintra_launch launch) const {
    const i64 n = items();
    if (!n || !call.t) return LINTRA_OK;
    const bool sorted = call.kind == LINTRA_SORTED;  // the rows of a tile are others in each round
    const i64 available = threads(), tiles = item(0).tiles, most = sorted ? 1 : (tiles + kPartTiles - 1) / kPartTiles;
    const i64 parts = clamp(4 * available / n, 1, most > 1 ? most : 1);
    const i64 workers = available < n * parts ? available : n * parts;
    const i64 widest = d_step() > e_step() ? d_step() : e_step();
    const i64 size = key_size() + kTile * (d_step() + kTile + e_step() + widest + 3);
    Memory memory;
    T* buffers = (T*)memory.get(workers * size * kSize, true);  // what pads rows has to be finite
    i64* current = (i64*)calloc(size_t(workers), sizeof(i64));
    if (!buffers || !current) return free(current), LINTRA_NO_MEMORY;
    parallel(launch, workers, n * parts, Subnormals::kFlushed, [&](i64 task, i64 worker) {
      if (sorted) forget_hidden(item(task));
      for (i64 round = 0; round < rounds(); ++round) {
        const Item x = item(task / parts, round);
        const bool fresh = sorted || current[worker] != task / parts + 1;
        forward_part(x, task % parts, parts, buffers + worker * size, fresh);
      }
      current[worker] = task / parts + 1;
    });
    free(current);
    return LINTRA_OK;
  }

  // Tokens that are in no chunk see nothing.
  void forget_hidden(Item x) const {
    x.order = nullptr;
    const TokenRows o = sums(call.o, x, call.e), logsumexp = sums(call.logsumexp, x, 1);
    const T nothing = -T(INFINITY);
    for (i64 i = 0; i < call.t; ++i) {
      memset((char*)o.at(i), 0, size_t(call.e) * kSize);
      memcpy((char*)logsumexp.at(i), &nothing, sizeof nothing);
    }
  }

  void forward_part(const Item& x, i64 part, i64 parts, T* mine, bool fresh) const {
    Ahead ahead[2];
    KeyRows<T> keys = key_rows(x, mine, ahead + 1);
    if (fresh) memset(keys.state, 0, size_t(key_tiles()));
    ForwardTile<T> tile;
    tile.d = call.d, tile.e = call.e, tile.d_step = d_step(), tile.e_step = e_step();
    T* rows_read = mine;
    mine += kTile * (d_step() > e_step() ? d_step() : e_step());
    tile.q_t = mine, mine += kTile * d_step();
    tile.scores = mine, mine += kTile * kTile;
    tile.o = mine, mine += kTile * e_step();
    tile.highest = mine, tile.total = mine + kTile, tile.fade = mine + 2 * kTile;
    const TokenRows q = token_rows(call.q, x, x.query, x.group * heads(), heads(), call.d);
    const TokenRows o = sums(call.o, x, call.e), logsumexp = sums(call.logsumexp, x, 1);
    const typename Sorted::Rule rule = this->rule(x);
    typename Sorted::Tokens tokens[2];
    ahead[0].tensors[0] = q, ahead[0].tensors[1] = o, ahead[0].count = 2;
    for (i64 i = x.tiles * part / parts; i < x.tiles * (part + 1) / parts; ++i) {
      const TileRows rows = this->rows(x, i);
      if (!rows.count) continue;
      read_tile(q, rows.first, rows.count, T(call.scale), rows_read, d_step());
      transpose_tile(rows_read, d_step(), tile.q_t);
      tile.begin();
      if (x.order) describe(x, rows.first, rows.count, tokens[0]);
      if (x.round) {  // resume
        read_tile(o, rows.first, rows.count, T(1), tile.o, e_step());
        for (i64 row = 0; row < rows.count; ++row) {
          memcpy(&tile.highest[row], logsumexp.at(rows.first + row), kSize);
          tile.total[row] = tile.highest[row] != -T(INFINITY);
        }
      }
      each_tile(x, rows, keys, ahead[0], [&](const Sight& sight, i64 first, int known) {
        const T *k = keys.keys + first * d_step(), *v = keys.values + first * e_step();
        const bool nonfinite = known & KeyRows<T>::kNonfiniteValues && !x.order;
        with_rule(x, sight, rule, tokens, first,
                  [&](auto&& seen) { tile.attend(sight, k, v, nonfinite, ahead, seen); });
      });
      for (i64 row = 0; row < rows.count; ++row) {
        const T found = tile.finish(row, rows_read);
        write_row((char*)o.at(rows.first + row), rows_read, call.e, o.dtype);
        memcpy((char*)logsumexp.at(rows.first + row), &found, sizeof found);
      }
    }
  }

  // Gradients of keys and values are summed by one task for all queries of an item or, where items are few, by several
  // and then over these in their order: how many there are depends on the sizes alone, and so does no result on threads.
  struct Parts {
    i64 count, keys;  // keys: the most that one reads
  };
  Parts parts() const {
    const i64 n = items(), most = call.kind == LINTRA_SORTED ? 1 : item(0).tiles / kPartTiles;
    const i64 count = clamp((kTasks + n - 1) / n, 1, most > 1 ? most : 1);
    i64 longest = 0;
    for (i64 residue = 0; residue < call.dilation; ++residue)
      for (i64 part = 0; part < count; ++part) {
        const Range keys = keys_of(item(residue * call.g), part, count);
        if (keys.to - keys.from > longest) longest = keys.to - keys.from;
      }
    return {count, longest + kBlockRows};
  }
  // The keys that the tiles of a part read.
  Range keys_of(const Item& x, i64 part, i64 parts) const {
    if (call.kind == LINTRA_BLOCKS || parts == 1) return {0, call.kind == LINTRA_SORTED ? call.s : x.keys};
    const i64 from = x.tiles * part / parts, to = x.tiles * (part + 1) / parts;
    Range keys = {0, 0};
    if (from == to) return keys;
    each_piece(x, rows(x, from), [&](const Piece& piece) { keys.from = piece.from; });
    i64 last = to - 1;
    while (!rows(x, last).count) --last;
    each_piece(x, rows(x, last), [&](const Piece& piece) { keys.to = piece.to; });
    return keys;
  }

  int backward(lintra_launch launch) const {
    const i64 n = items();
    if (!n) return LINTRA_OK;
    const Parts cut = call.t ? parts() : Parts{1, key_count()};
    const i64 tasks = n * cut.count, available = threads(), workers = available < tasks ? available : tasks;
    const bool sorted = call.kind == LINTRA_SORTED;
    // Sorted: of the places of a round, and of q, k and v of the tokens.
    const i64 round_size = cut.keys * (d_step() + e_step());
    const i64 sums_size = round_size + (sorted ? cut.keys * (2 * d_step() + e_step()) : 0);
    const i64 size = key_size() + kTile * (3 * d_step() + 3 * e_step() + 2 * kTile + 2);
    const bool shared = cut.count > 1;
    Memory memory, sums_memory;
    T* buffers = (T*)memory.get(workers * size * kSize, true);
    T* all_sums = (T*)sums_memory.get((shared ? tasks : workers) * sums_size * kSize, false);
    if (!buffers || !all_sums) return LINTRA_NO_MEMORY;
    parallel(launch, workers, tasks, Subnormals::kFlushed, [&](i64 task, i64 worker) {
      const Item x = item(task / cut.count);
      T* sums = all_sums + (shared ? task : worker) * sums_size;
      memset((void*)sums, 0, size_t(sums_size) * kSize);
      if (sorted) return sorted_gradients(task, cut, buffers + worker * size, sums, sums + round_size);
      part_gradients(x, task % cut.count, cut, buffers + worker * size, sums, nullptr);
      if (!shared) write_key_gradients(x, 0, x.keys, cut, sums, sums_size, buffers + worker * size);
    });
    if (shared) {
      const i64 tiles = (key_count() + kTile - 1) / kTile;
      parallel(launch, workers, n * tiles, Subnormals::kFlushed, [&](i64 task, i64 worker) {
        const Item x = item(task / tiles);
        const i64 from = task % tiles * kTile, to = from + kTile < x.keys ? from + kTile : x.keys;
        T* sums = all_sums + task / tiles * cut.count * sums_size;
        write_key_gradients(x, from, to, cut, sums, sums_size, buffers + worker * size);
      });
    }
    return LINTRA_OK;
  }

  // The gradients of all rounds: of the places of each, added to those of the tokens.
  void sorted_gradients(i64 task, const Parts& cut, T* mine, T* of_places, T* of_tokens) const {
    T *dk = of_tokens, *dv = dk + cut.keys * d_step(), *dq = dv + cut.keys * e_step();
    for (i64 round = 0; round < call.rounds; ++round) {
      const Item x = item(task, round);
      if (round) memset((void*)of_places, 0, size_t(cut.keys * (d_step() + e_step())) * kSize);
      part_gradients(x, 0, cut, mine, of_places, dq);
      for (i64 j = 0; j < x.keys; ++j) {
        add_row(of_places + j * d_step(), dk + x.order[j] * d_step(), d_step());
        add_row(of_places + cut.keys * d_step() + j * e_step(), dv + x.order[j] * e_step(), e_step());
      }
    }
    Item x = item(task);
    x.order = nullptr;
    write_key_gradients(x, 0, call.t, cut, of_tokens, 0, mine);
    const TokenRows rows = gradient(call.dq, x, call.t, 0, x.group, call.h, 1, call.d);
    for (i64 i = 0; i < call.t; ++i) write_row((char*)rows.at(i), dq + i * d_step(), call.d, call.dtype);
  }
  static void add_row(const T* from, T* to, i64 step) {
    for (i64 c = 0; c < step; c += W) store(to + c, load(to + c) + load(from + c));
  }

  // `dq_sums`: of the tokens, to be added to; absent: dq is written.
  void part_gradients(const Item& x, i64 part, const Parts& cut, T* mine, T* sums_of_keys, T* dq_sums) const {
    Ahead ahead[2];
    KeyRows<T> keys = key_rows(x, mine, ahead + 1);
    memset(keys.state, 0, size_t(key_tiles()));
    BackwardTile<T> tile;
    tile.d = call.d, tile.e = call.e, tile.d_step = d_step(), tile.e_step = e_step();
    tile.q = mine, mine += kTile * d_step();
    tile.q_t = mine, mine += kTile * d_step();
    tile.dq = mine, mine += kTile * d_step();
    tile.dO = mine, mine += kTile * e_step();
    tile.dO_t = mine, mine += kTile * e_step();
    T* o_rows = mine;
    mine += kTile * e_step();
    tile.scores = mine, mine += kTile * kTile;
    tile.dscores = mine, mine += kTile * kTile;
    tile.logsumexp = mine, tile.less = mine + kTile;
    const i64 head = x.group * heads(), first_key = keys_of(x, part, cut.count).from;
    const TokenRows q = token_rows(call.q, x, x.query, head, heads(), call.d);
    const TokenRows dq = gradient(call.dq, x, call.t, x.query, head, call.h, heads(), call.d);
    const TokenRows o = sums(call.o, x, call.e), logsumexp = sums(call.logsumexp, x, 1);
    const TokenRows dlogsumexp = sums(call.dlogsumexp ? call.dlogsumexp : call.logsumexp, x, 1);
    TokenRows dO = o;
    dO.data = call.dO.data + (x.row * call.dO.b + x.query * call.dO.t + head * call.dO.h) * kSize;
    dO.token = x.step * call.dO.t * kSize, dO.head = call.dO.h * kSize;
    ahead[0] = {{q, dO, o, dq}, dq_sums ? 3 : 4};
    const typename Sorted::Rule rule = this->rule(x);
    typename Sorted::Tokens tokens[2];
    T *dk = sums_of_keys, *dv = sums_of_keys + cut.keys * d_step();
    for (i64 i = x.tiles * part / cut.count; i < x.tiles * (part + 1) / cut.count; ++i) {
      const TileRows rows = this->rows(x, i);
      if (!rows.count) continue;
      const bool finite_q = read_tile(q, rows.first, rows.count, T(call.scale), tile.q, d_step());
      const bool finite_dO = read_tile(dO, rows.first, rows.count, T(1), tile.dO, e_step());
      tile.nonfinite_q = !finite_q && !x.order, tile.nonfinite_dO = !finite_dO && !x.order;
      read_tile(o, rows.first, rows.count, T(1), o_rows, e_step());
      for (i64 row = 0; row < kTile; ++row) {
        T found = -T(INFINITY), added = 0;
        if (row < rows.count) memcpy(&found, logsumexp.at(rows.first + row), sizeof found);
        if (row < rows.count && call.dlogsumexp) memcpy(&added, dlogsumexp.at(rows.first + row), sizeof added);
        const bool blind = found == -T(INFINITY);  // it has no gradient
        if (blind) memset((void*)(tile.dO + row * e_step()), 0, size_t(e_step()) * kSize);
        Vec<T> dot{};
        for (i64 c = row * e_step(); c < (row + 1) * e_step(); c += W) dot += load(tile.dO + c) * load(o_rows + c);
        tile.logsumexp[row] = blind ? T(INFINITY) : found;
        tile.less[row] = blind ? T(0) : sum<T>(dot) - added;
      }
      transpose_tile(tile.q, d_step(), tile.q_t);
      transpose_tile(tile.dO, e_step(), tile.dO_t);
      if (x.order) describe(x, rows.first, rows.count, tokens[0]);
      memset((void*)tile.dq, 0, size_t(kTile * d_step()) * kSize);
      each_tile(x, rows, keys, ahead[0], [&](const Sight& sight, i64 first, int known) {
        const T *k = keys.keys + first * d_step(), *v = keys.values + first * e_step();
        const i64 at = first - first_key;
        const bool nonfinite = known & KeyRows<T>::kNonfiniteKeys && !x.order;
        with_rule(x, sight, rule, tokens, first, [&](auto&& seen) {
          tile.attend(sight, k, v, nonfinite, dk + at * d_step(), dv + at * e_step(), ahead, seen);
        });
      });
      for (i64 row = 0; row < rows.count; ++row) {
        T* from = tile.dq + row * d_step();
        for (i64 c = 0; c < d_step(); c += W) store(from + c, load(from + c) * T(call.scale));
        if (dq_sums)
          add_row(from, dq_sums + x.order[rows.first + row] * d_step(), d_step());
        else
          write_row((char*)dq.at(rows.first + row), from, call.d, call.dtype);
      }
    }
  }

  // The gradients of the keys from..to of an item, summed over its parts. `spare` holds one row.
  void write_key_gradients(const Item& x, i64 from, i64 to, const Parts& cut, const T* sums, i64 size, T* spare) const {
    write_gradient(gradient(call.dk, x, call.s, x.key, x.group, call.g, 1, call.d), x, from, to, cut, sums, size, spare,
                   d_step());
    write_gradient(gradient(call.dv, x, call.s, x.key, x.group, call.g, 1, call.e), x, from, to, cut,
                   sums + cut.keys * d_step(), size, spare, e_step());
  }
  void write_gradient(const TokenRows& rows, const Item& x, i64 from, i64 to, const Parts& cut, const T* sums, i64 size,
                      T* spare, i64 step) const {
    Range keys[kTasks];
    for (i64 part = 0; part < cut.count; ++part) keys[part] = keys_of(x, part, cut.count);
    for (i64 j = from; j < to; ++j) {
      const T* row = sums + j * step;
      if (cut.count > 1) {
        memset((void*)spare, 0, size_t(step) * kSize);
        for (i64 part = 0; part < cut.count; ++part) {
          if (j < keys[part].from || j >= keys[part].to) continue;
          const T* added = sums + part * size + (j - keys[part].from) * step;
          for (i64 c = 0; c < step; c += W) store(spare + c, load(spare + c) + load(added + c));
        }
        row = spare;
      }
      write_row((char*)rows.at(j), row, rows.width, rows.dtype);
    }
  }
};

int softmax_forward(const lintra_softmax& call, lintra_launch launch) {
  if (call.dtype == LINTRA_FLOAT64) return SoftmaxCall<double>{call}.forward(launch);
  return SoftmaxCall<float>{call}.forward(launch);
}

int softmax_backward(const lintra_softmax& call, lintra_launch launch) {
  if (call.dtype == LINTRA_FLOAT64) return SoftmaxCall<double>{call}.backward(launch);
  return SoftmaxCall<float>{call}.backward(launch);
}

}  // namespace LINTRA_ISA
}  // namespace lintra
