#include "allocator.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

namespace test_accelerator {

namespace {

using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

constexpr size_t kBlock = 512;
constexpr size_t kSmall = size_t(1) << 20;         // requests up to that share small segments
constexpr size_t kSmallSegment = size_t(2) << 20;
constexpr size_t kLargeSegment = size_t(20) << 20;
constexpr size_t kOwnSegment = size_t(10) << 20;   // requests from that on have segments of their own
constexpr size_t kRound = size_t(2) << 20;         // of which these are multiples
constexpr size_t kAddresses = size_t(1) << 40;     // reserved at once: they take no memory until they are used
constexpr int kPoison = 0x5a;

size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Faults& faults() {
  static auto* made = new Faults;
  return *made;
}

bool Pool::Less::operator()(const Block* one, const Block* other) const {
  return std::tie(one->size, one->address) < std::tie(other->size, other->address);
}

char* Addresses::take(size_t size) {
  if (size_t(end_ - next_) < size) {
    constexpr int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    auto* found = mmap(nullptr, kAddresses, PROT_NONE, kind, -1, 0);
    if (found == MAP_FAILED) return nullptr;
    next_ = static_cast<char*>(found);
    end_ = next_ + kAddresses;
  }
  if (mprotect(next_, size, PROT_READ | PROT_WRITE) != 0) return nullptr;
  char* address = next_;
  next_ += size;
  return address;
}

void Addresses::give_back(char* address, size_t size) { munmap(address, size); }

Pool::Pool(c10::DeviceIndex device) : device_(device) {}

template <typename Change>
void Pool::count(StatArray& stat, bool is_small, Change change) {
  change(stat[size_t(StatType::AGGREGATE)]);
  change(stat[size_t(is_small ? StatType::SMALL_POOL : StatType::LARGE_POOL)]);
}

void* Pool::allocate(size_t requested, c10::StreamId stream) {
  if (requested == 0) return nullptr;
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  put_back_what_streams_are_done_with(false);
  const size_t size = rounded(requested, kBlock);
  const bool is_small = size <= kSmall;
  auto& fail_in = faults().fail_in;
  const bool fails = fail_in > 0 && --fail_in == 0;
  Block* block = fails ? nullptr : found(size, is_small, stream);
  if (!block && !fails) block = in_new_segment(size, is_small, stream);
  if (!block && !fails) {
    stats_.num_alloc_retries++;
    put_back_what_streams_are_done_with(true);
    give_back_segments();
    block = in_new_segment(size, is_small, stream);
  }
  if (!block) {
    stats_.num_ooms++;
    note("oom", reinterpret_cast<void*>(free_bytes()), size, stream);
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "Test accelerator out of memory. Tried to allocate ", requested, " bytes on device ",
        int(device_), ", which has ", total_, " bytes, of which ", reserved_, " are reserved.");
  }
  split(block, size);
  block->is_allocated = true;
  block->requested = requested;
  live_[block->address] = block;
  count(stats_.allocation, is_small, [](auto& stat) { stat.increase(1); });
  count(stats_.active, is_small, [](auto& stat) { stat.increase(1); });
  for (auto* stat : {&stats_.allocated_bytes, &stats_.active_bytes}) {
    count(*stat, is_small, [&](auto& one) { one.increase(block->size); });
  }
  count(stats_.requested_bytes, is_small, [&](auto& stat) { stat.increase(requested); });
  note("alloc", block->address, requested, stream);
  return block->address;
}

Block* Pool::found(size_t size, bool is_small, c10::StreamId stream) {
  auto& free = free_[{is_small, stream}];
  Block wanted{nullptr, nullptr, size};
  const auto place = free.lower_bound(&wanted);
  if (place == free.end()) return nullptr;
  Block* block = *place;
  free.erase(place);
  if (block->before || block->after) {
    count(stats_.inactive_split, is_small, [](auto& stat) { stat.decrease(1); });
    count(stats_.inactive_split_bytes, is_small, [&](auto& stat) { stat.decrease(block->size); });
  }
  return block;
}

Block* Pool::in_new_segment(size_t size, bool is_small, c10::StreamId stream) {
  const size_t taken = is_small ? kSmallSegment : size < kOwnSegment ? kLargeSegment : rounded(size, kRound);
  if (reserved_ + taken > total_) return nullptr;
  auto* address = addresses_.take(taken);
  if (!address) return nullptr;
  if (faults().poisons) std::memset(address, kPoison, taken);
  auto segment = std::make_unique<Segment>(Segment{address, taken, is_small, stream, nullptr});
  auto* block = new Block{segment.get(), address, taken};
  segment->first = block;
  segments_[address] = std::move(segment);
  reserved_ += taken;
  stats_.num_device_alloc++;
  count(stats_.segment, is_small, [](auto& stat) { stat.increase(1); });
  count(stats_.reserved_bytes, is_small, [&](auto& stat) { stat.increase(taken); });
  note("segment_alloc", address, taken, stream);
  return block;
}

void Pool::split(Block* block, size_t size) {
  const bool is_small = block->segment->is_small;
  const size_t rest = block->size - size;
  if (is_small ? rest < kBlock : rest <= kSmall) return;
  auto* other = new Block{block->segment, block->address + size, rest};
  other->before = block;
  other->after = block->after;
  if (other->after) other->after->before = other;
  block->after = other;
  block->size = size;
  free_[{is_small, block->segment->stream}].insert(other);
  count(stats_.inactive_split, is_small, [](auto& stat) { stat.increase(1); });
  count(stats_.inactive_split_bytes, is_small, [&](auto& stat) { stat.increase(rest); });
}

void Pool::release(void* address) {
  if (!address) return;
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  const auto place = live_.find(address);
  TORCH_INTERNAL_ASSERT(place != live_.end(), "a block is freed that nobody has");
  Block* block = place->second;
  live_.erase(place);
  const bool is_small = block->segment->is_small;
  block->is_allocated = false;
  count(stats_.allocation, is_small, [](auto& stat) { stat.decrease(1); });
  count(stats_.allocated_bytes, is_small, [&](auto& stat) { stat.decrease(block->size); });
  count(stats_.requested_bytes, is_small, [&](auto& stat) { stat.decrease(block->requested); });
  note("free_requested", block->address, block->requested, block->segment->stream);
  if (block->used_on.empty()) {
    put_back(block);
    return;
  }
  std::vector<MomentPointer> moments;
  for (const auto& stream : block->used_on) moments.push_back(moment_on(stream));
  block->used_on.clear();
  leaving_.emplace_back(block, std::move(moments));
}

void Pool::put_back_what_streams_are_done_with(bool wait) {
  for (auto place = leaving_.begin(); place != leaving_.end();) {
    bool is_done = true;
    for (const auto& moment : place->second) {
      if (wait) moment->wait();
      is_done = is_done && moment->is_reached();
    }
    Block* block = place->first;
    place = is_done ? leaving_.erase(place) : std::next(place);
    if (is_done) put_back(block);
  }
}

void Pool::put_back(Block* block) {
  const bool is_small = block->segment->is_small;
  count(stats_.active, is_small, [](auto& stat) { stat.decrease(1); });
  count(stats_.active_bytes, is_small, [&](auto& stat) { stat.decrease(block->size); });
  note("free_completed", block->address, block->requested, block->segment->stream);
  if (faults().poisons) {
    // In the order of its stream, as what is written next there: others that it waits for may still read what was.
    const c10::Stream stream(c10::Stream::UNSAFE, c10::Device(kDevice, device_), block->segment->stream);
    queue_of(stream).tell([at = block->address, size = block->size] { std::memset(at, kPoison, size); }, true);
  }
  block->requested = 0;
  if (!faults().never_merge) {
    block = merged(block, block->before);
    block = merged(block, block->after);
  }
  free_[{is_small, block->segment->stream}].insert(block);
  if (block->before || block->after) {
    count(stats_.inactive_split, is_small, [](auto& stat) { stat.increase(1); });
    count(stats_.inactive_split_bytes, is_small, [&](auto& stat) { stat.increase(block->size); });
  }
}

Block* Pool::merged(Block* block, Block* other) {
  if (!other) return block;
  auto& free = free_[{block->segment->is_small, block->segment->stream}];
  const auto place = free.find(other);
  if (place == free.end() || *place != other) return block;  // in use
  free.erase(place);
  count(stats_.inactive_split, block->segment->is_small, [](auto& stat) { stat.decrease(1); });
  count(stats_.inactive_split_bytes, block->segment->is_small, [&](auto& stat) { stat.decrease(other->size); });
  Block* low = block->address < other->address ? block : other;
  Block* high = low == block ? other : block;
  low->size += high->size;
  low->after = high->after;
  if (low->after) low->after->before = low;
  delete high;
  return low;
}

void Pool::give_back_segments() {
  wait_for_device(device_);  // as the driver does
  for (auto& [key, free] : free_) {
    for (auto place = free.begin(); place != free.end();) {
      Block* block = *place;
      if (block->before || block->after) {
        ++place;
        continue;
      }
      place = free.erase(place);
      Segment* segment = block->segment;
      const bool is_small = segment->is_small;
      reserved_ -= segment->size;
      stats_.num_device_free++;
      count(stats_.segment, is_small, [](auto& stat) { stat.decrease(1); });
      count(stats_.reserved_bytes, is_small, [&](auto& stat) { stat.decrease(segment->size); });
      note("segment_free", segment->address, segment->size, segment->stream);
      addresses_.give_back(segment->address, segment->size);
      segments_.erase(segment->address);
      delete block;
    }
  }
}

void Pool::used_on(void* address, c10::Stream stream) {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  const auto place = live_.find(address);
  if (place == live_.end() || place->second->segment->stream == stream.id()) return;
  auto& known = place->second->used_on;
  if (std::find(known.begin(), known.end(), stream) == known.end()) known.push_back(stream);
}

void Pool::empty_cache() {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  put_back_what_streams_are_done_with(true);
  give_back_segments();
}

void Pool::limit(size_t total_bytes) {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  total_ = total_bytes;
}

size_t Pool::total_bytes() const { return total_; }

size_t Pool::free_bytes() {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  return total_ > reserved_ ? total_ - reserved_ : 0;
}

c10::CachingDeviceAllocator::DeviceStats Pool::stats() {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  return stats_;
}

namespace {

std::vector<StatArray*> arrays(c10::CachingDeviceAllocator::DeviceStats& stats) {
  return {
      &stats.allocation,      &stats.segment,      &stats.active,
      &stats.inactive_split,  &stats.allocated_bytes, &stats.reserved_bytes,
      &stats.active_bytes,    &stats.inactive_split_bytes, &stats.requested_bytes};
}

}  // namespace

void Pool::reset_peaks() {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  for (auto* array : arrays(stats_)) {
    for (auto& stat : *array) stat.reset_peak();
  }
}

void Pool::reset_accumulated() {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  for (auto* array : arrays(stats_)) {
    for (auto& stat : *array) stat.reset_accumulated();
  }
}

void Pool::record_history(bool is_on) {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  records_ = is_on;
  if (!is_on) history_.clear();
}

bool Pool::records_history() {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  return records_;
}

std::vector<Event> Pool::history() {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  return history_;
}

std::vector<Segment> Pool::segments() {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  std::vector<Segment> found;
  for (const auto& [address, segment] : segments_) found.push_back(*segment);
  return found;
}

std::vector<std::tuple<size_t, size_t, size_t, bool>> Pool::blocks(const Segment& segment) {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  std::vector<std::tuple<size_t, size_t, size_t, bool>> found;
  for (const Block* block = segment.first; block; block = block->after) {
    found.emplace_back(reinterpret_cast<size_t>(block->address), block->size, block->requested, block->is_allocated);
  }
  return found;
}

void Pool::note(const char* action, const void* address, size_t size, c10::StreamId stream) {
  if (records_) history_.push_back({action, reinterpret_cast<size_t>(address), size, now_ns(), stream});
}

Pool& pool_of(c10::DeviceIndex device) {
  static auto* pools = [] {
    auto* made = new std::vector<std::unique_ptr<Pool>>;
    for (int index = 0; index < kDevices; ++index) made->push_back(std::make_unique<Pool>(index));
    return made;
  }();
  return *pools->at(device);
}

// ---- what PyTorch asks for -------------------------------------------------------------------------------

namespace {

// Of a block as PyTorch holds it: where it is, and on which device.
struct Held {
  void* address;
  c10::DeviceIndex device;
};

void release_held(void* context) {
  auto* held = static_cast<Held*>(context);
  pool_of(held->device).release(held->address);
  delete held;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const auto device = current_device();
    void* address = pool_of(device).allocate(size, current_stream(device).id());
    return {address, new Held{address, device}, &release_held, c10::Device(kDevice, device)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < kDevices; ++device) pool_of(device).empty_cache();
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get_context()) {
      const auto* held = static_cast<Held*>(pointer.get_context());
      pool_of(held->device).used_on(held->address, stream);
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return pool_of(device).stats();
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { pool_of(device).reset_accumulated(); }
  void resetPeakStats(c10::DeviceIndex device) override { pool_of(device).reset_peaks(); }
  // Not told to be an override: PyTorch 2.9 has none.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {
    return {pool_of(device).free_bytes(), pool_of(device).total_bytes()};
  }
};

// Memory of the host that copies may read and write by themselves. What is freed is given to others as soon as the
// streams are done with it.
struct PinnedAllocator final : c10::Allocator {
  struct Buffer {
    size_t size;
    std::vector<MomentPointer> moments;
  };
  std::mutex mutex;
  std::map<char*, Buffer> live;
  std::list<std::pair<char*, Buffer>> leaving;

  c10::DataPtr allocate(size_t size) override {
    std::lock_guard<std::mutex> guard(mutex);
    leaving.remove_if([](auto& one) {
      for (const auto& moment : one.second.moments) {
        if (!moment->is_reached()) return false;
      }
      std::free(one.first);
      return true;
    });
    if (size == 0) return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
    auto* address = static_cast<char*>(std::aligned_alloc(64, rounded(size, 64)));
    TORCH_CHECK_WITH(OutOfMemoryError, address, "no memory for ", size, " pinned bytes");
    live[address] = {size, {}};
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }

  static PinnedAllocator& it() {
    static auto* made = new PinnedAllocator;
    return *made;
  }
  static void release(void* address) {
    if (!address) return;
    auto& self = it();
    std::lock_guard<std::mutex> guard(self.mutex);
    const auto place = self.live.find(static_cast<char*>(address));
    self.leaving.emplace_back(place->first, std::move(place->second));
    self.live.erase(place);
  }
  std::map<char*, Buffer>::iterator holding(const void* address) {
    auto place = live.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (place == live.begin()) return live.end();
    --place;
    return static_cast<const char*>(address) < place->first + place->second.size ? place : live.end();
  }
};

}  // namespace

c10::DeviceAllocator* allocator() {
  static auto* made = new DeviceAllocator;
  return made;
}

c10::Allocator* pinned_allocator() { return &PinnedAllocator::it(); }

bool is_pinned(const void* address) {
  auto& pinned = PinnedAllocator::it();
  std::lock_guard<std::mutex> guard(pinned.mutex);
  return pinned.holding(address) != pinned.live.end();
}

void pinned_used_on(const void* address, const c10::Stream& stream) {
  auto moment = moment_on(stream);
  auto& pinned = PinnedAllocator::it();
  std::lock_guard<std::mutex> guard(pinned.mutex);
  const auto place = pinned.holding(address);
  if (place != pinned.live.end()) place->second.moments.push_back(std::move(moment));
}

}  // namespace test_accelerator
