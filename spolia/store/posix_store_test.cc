// What only the file system has: links, pipes, permissions, limits.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "spolia/store/memory_store.h"
#include "spolia/store/open_beneath.h"
#include "spolia/store/read_ahead.h"
#include "spolia/store/store_testing.h"

namespace spolia {
namespace {

class PosixStore : public testing::Test {
 protected:
  PosixStore() {
    for (const char* folder : {"inside", "inside/sub", "outside"}) fs::create_directory(at(folder));
    put(*store_, at("inside/file"), "inside");
    put(*store_, at("inside/sub/file"), "sub");
    put(*store_, at("outside/file"), "outside");
  }

  fs::path at(const std::string& name) const { return temp_.path() / name; }

  TempFolder temp_;
  std::shared_ptr<Store> store_ = posix_store();
};

/// What opening `name` in `folder` gives: the text, or how it failed.
using Open = std::function<std::string(const fs::path& folder, const std::string& name)>;

std::string open_inside(const fs::path& folder, const std::string& name) {
  try {
    return text_of(*posix_store()->open_inside(folder, name));
  } catch (const CorruptError& error) {
    return std::string(error.what()).find("leads out of its folder") != std::string::npos ? "leads out"
                                                                                          : error.what();
  } catch (const Error& error) {
    return std::string(name_of(error.kind()));
  }
}

std::string open_by_path(const fs::path& folder, const std::string& name) {
  const FileDescriptor root(::open(folder.c_str(), O_PATH));
  const FileDescriptor file = open_beneath_by_path(root.get(), name, O_RDONLY);
  if (!file) return errno == EXDEV ? "leads out" : errno == ENOENT ? "not found" : "I/O";
  std::string text(100, '\0');
  text.resize(static_cast<size_t>(::read(file.get(), text.data(), text.size())));
  return text;
}

TEST_F(PosixStore, ReadingAheadIsAHintForAnyFileAndAnyPartOfIt) {
  const std::string text(300'000, 'x');
  const auto memory = std::make_shared<MemoryStore>();
  memory->create_folder("/folder");
  for (const auto& [store, path] :
       {std::pair<std::shared_ptr<Store>, fs::path>{store_, at("file")}, {memory, "/folder/file"}}) {
    store->create(path)->write(0, std::as_bytes(std::span(text)));
    const auto file = store->open(path);
    for (const int64_t offset : {0, 4096, 299'999, 300'000, 1'000'000}) read_ahead(*file, offset, 131'072);
    EXPECT_EQ(text_of(*file), text);
  }
}

TEST_F(PosixStore, LinksMayLeadAnywhereInTheFolderAndNowhereElse) {
  const auto link = [&](const fs::path& target, const char* name) {
    fs::create_symlink(target, at("inside") / name);
  };
  link("sub/file", "within");
  link("sub", "folder_within");
  link("within", "link_to_link");
  link("../../inside/file", "sub/out_and_out");  // not below `inside` from where it starts
  link("../file", "sub/up");
  link("../outside/file", "out");
  link("../outside", "folder_out");
  link(at("outside/file"), "absolute_out");
  link("/proc/self/root/etc/passwd", "magic");
  link("/proc/self/cwd", "magic_folder");
  link("out", "link_to_out");
  link("nothing", "dangling");
  link("loop", "loop");
  for (const Open& open : {Open(open_inside), Open(open_by_path)}) {
    EXPECT_EQ(open(at("inside"), "file"), "inside");
    EXPECT_EQ(open(at("inside"), "within"), "sub");
    EXPECT_EQ(open(at("inside"), "folder_within/file"), "sub");
    EXPECT_EQ(open(at("inside"), "link_to_link"), "sub");
    EXPECT_EQ(open(at("inside"), "sub/up"), "inside");
    EXPECT_EQ(open(at("inside"), "out"), "leads out");
    EXPECT_EQ(open(at("inside"), "folder_out/file"), "leads out");
    EXPECT_EQ(open(at("inside"), "absolute_out"), "leads out");
    EXPECT_EQ(open(at("inside"), "magic"), "leads out");
    EXPECT_EQ(open(at("inside"), "magic_folder"), "leads out");
    EXPECT_EQ(open(at("inside"), "link_to_out"), "leads out");
    EXPECT_EQ(open(at("inside"), "dangling"), "not found");
    EXPECT_EQ(open(at("inside"), "loop"), "I/O");
  }
  EXPECT_EQ(open_inside(at("inside"), "sub/out_and_out"), "leads out");
  EXPECT_EQ(open_by_path(at("inside"), "sub/out_and_out"), "inside");
}

TEST_F(PosixStore, FolderNamesThatBeginAlikeAreNotTheSame) {
  fs::create_directory(at("inside2"));
  put(*store_, at("inside2/file"), "other");
  fs::create_symlink("../inside2/file", at("inside/alike"));
  EXPECT_EQ(open_inside(at("inside"), "alike"), "leads out");
  EXPECT_EQ(open_by_path(at("inside"), "alike"), "leads out");
}

TEST_F(PosixStore, TheFolderItselfMayBeALink) {
  fs::create_symlink("inside", at("link"));
  EXPECT_EQ(open_inside(at("link"), "file"), "inside");
  EXPECT_EQ(open_inside(at("link"), "sub/file"), "sub");
}

TEST_F(PosixStore, HuggingFaceCacheIsOneFolder) {
  const fs::path revision = at("models--x/snapshots/0123");
  fs::create_directories(revision / "text_encoder");
  fs::create_directory(at("models--x/blobs"));
  put(*store_, at("models--x/blobs/abcd"), "blob");
  fs::create_symlink("../../blobs/abcd", revision / "x.safetensors");
  fs::create_symlink("../../../blobs/abcd", revision / "text_encoder/y.safetensors");
  fs::create_symlink("../../../outside/file", revision / "out");
  EXPECT_EQ(open_inside(revision, "x.safetensors"), "blob");
  EXPECT_EQ(open_inside(revision, "text_encoder/y.safetensors"), "blob");
  EXPECT_EQ(open_inside(revision / "text_encoder", "y.safetensors"), "blob");
  EXPECT_EQ(open_inside(revision, "out"), "leads out");
  EXPECT_EQ(open_inside(revision, "../../blobs/abcd"), "leads out");
  const auto entries = store_->list(revision);  // looks through the links
  ASSERT_EQ(entries.size(), 3u);
  EXPECT_TRUE(entries[1].is_folder);
  EXPECT_EQ(entries[2].size, 4);
}

TEST_F(PosixStore, SnapshotsWithoutBlobsIsAFolderLikeAnyOther) {
  fs::create_directories(at("backup/snapshots/monday"));
  put(*store_, at("backup/key"), "secret");
  fs::create_symlink("../../key", at("backup/snapshots/monday/x"));
  EXPECT_EQ(open_inside(at("backup/snapshots/monday"), "x"), "leads out");
}

TEST_F(PosixStore, OpenInsideWhileTheTreeChanges) {
  fs::create_symlink("../file", at("inside/sub/up"));
  std::jthread mover([&](std::stop_token stop) {
    while (!stop.stop_requested()) {
      fs::rename(at("outside"), at("elsewhere"));
      fs::rename(at("elsewhere"), at("outside"));
    }
  });
  for (int i = 0; i < 2000; ++i) ASSERT_EQ(open_inside(at("inside"), "sub/up"), "inside");
}

TEST_F(PosixStore, PipesAndDevicesAreRefusedAtOnce) {
  ASSERT_EQ(::mkfifo(at("inside/pipe").c_str(), 0600), 0);
  expect_error(ErrorKind::kIo, {at("inside/pipe"), "not a regular file"},
               [&] { store_->open(at("inside/pipe")); });
  expect_error(ErrorKind::kIo, {at("inside/pipe"), "not a regular file"},
               [&] { store_->open_inside(at("inside"), "pipe"); });
  expect_error(ErrorKind::kIo, {"/dev/zero", "not a regular file"}, [&] { store_->open("/dev/zero"); });
  EXPECT_EQ(store_->list(at("inside"))[1].size, 0);
}

TEST_F(PosixStore, AFileThatShrinksWhileOpenIsCorrupt) {
  const auto in = store_->open(at("inside/file"));
  fs::resize_file(at("inside/file"), 4);
  std::array<std::byte, 3> out;
  expect_error(ErrorKind::kCorrupt, {at("inside/file"), "3 bytes at offset 2", "has 4 bytes"},
               [&] { in->read(2, out); });
  in->read(1, out);
}

TEST_F(PosixStore, AFullDiskIsReportedWithThePath) {
  // A limit on the size of files fails as a full disk does: first a short write, then an error.
  rlimit before;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{4096, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto out = store_->create(at("big"));
  const std::vector<std::byte> bytes(10000);
  expect_error(ErrorKind::kIo, {at("big"), "write 5904 bytes at offset 4096", "File too large"},
               [&] { out->write(0, bytes); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(store_->open(at("big"))->size(), 4096);
}

TEST_F(PosixStore, ACopyFromAFileThatShrankIsCorrupt) {
  const auto in = store_->open(at("inside/file"));
  const auto out = store_->create(at("copy"));
  fs::resize_file(at("inside/file"), 4);
  expect_error(ErrorKind::kCorrupt, {at("inside/file"), "has 4 bytes"},
               [&] { out->copy_from(*in, 1, 0, 5); });
  out->copy_from(*in, 1, 0, 3);
  EXPECT_EQ(get(*store_, at("copy")).substr(0, 3), "nsi");
}

TEST_F(PosixStore, CopiesFromAnotherFileSystem) {
  if (!store_->is_folder("/dev/shm")) GTEST_SKIP() << "no /dev/shm";
  const fs::path file = "/dev/shm/spolia_store_test_" + std::to_string(::getpid());
  put(*store_, file, "other");
  const auto in = store_->open(file);
  store_->remove_all(file);
  store_->create(at("copy"))->copy_from(*in, 1, 0, 4);
  EXPECT_EQ(get(*store_, at("copy")), "ther");
}

TEST_F(PosixStore, ExchangeAndLinks) {
  fs::create_directory_symlink("outside", at("link"));
  EXPECT_TRUE(store_->is_link(at("link")));
  EXPECT_TRUE(store_->is_link(at("link/")));
  EXPECT_TRUE(store_->is_folder(at("link")));
  EXPECT_FALSE(store_->is_link(at("link/file")));
  store_->exchange(at("link"), at("inside"));  // links are swapped, not what they lead to
  EXPECT_TRUE(store_->is_link(at("inside")));
  EXPECT_EQ(get(*store_, at("inside/file")), "outside");
  EXPECT_EQ(get(*store_, at("link/file")), "inside");
  expect_error(ErrorKind::kIo, {at("outside/../link/sub"), "Invalid argument"},
               [&] { store_->exchange(at("outside/../link/sub"), at("link")); });
}

/// Takes root's power over files away from this thread; for anyone else it changes nothing.
class Unprivileged {
 public:
  Unprivileged() : before_(::setfsuid(::geteuid() == 0 ? 65534 : ::geteuid())) {}
  ~Unprivileged() { ::setfsuid(static_cast<uid_t>(before_)); }

 private:
  int before_;
};

TEST_F(PosixStore, MissingPermissionsAreReportedWithThePath) {
  const std::string denied = "Permission denied";
  fs::permissions(temp_.path(), fs::perms::group_exec | fs::perms::others_exec, fs::perm_options::add);
  fs::permissions(at("inside/file"), fs::perms::none);
  fs::permissions(at("outside"), fs::perms::none);
  {
    const Unprivileged unprivileged;
    expect_error(ErrorKind::kIo, {at("inside/file"), denied}, [&] { store_->open(at("inside/file")); });
    expect_error(ErrorKind::kIo, {at("inside/file"), denied},
                 [&] { store_->open_inside(at("inside"), "file"); });
    expect_error(ErrorKind::kIo, {at("outside/file"), denied}, [&] { store_->exists(at("outside/file")); });
    expect_error(ErrorKind::kIo, {at("outside/sub"), denied}, [&] { store_->is_folder(at("outside/sub")); });
    expect_error(ErrorKind::kIo, {at("outside"), denied}, [&] { store_->list(at("outside")); });
    expect_error(ErrorKind::kIo, {at("outside"), denied}, [&] { store_->sync_folder(at("outside")); });
    expect_error(ErrorKind::kIo, {at("outside/new"), denied}, [&] { store_->create(at("outside/new")); });
    expect_error(ErrorKind::kIo, {at("outside/new"), denied},
                 [&] { store_->create_folder(at("outside/new")); });
    expect_error(ErrorKind::kIo, {at("outside"), denied}, [&] { store_->remove_all(at("outside")); });
    expect_error(ErrorKind::kIo, {at("outside/new"), denied},
                 [&] { store_->rename(at("outside/file"), at("outside/new")); });
  }
  fs::permissions(at("outside"), fs::perms::owner_all);
  EXPECT_TRUE(store_->exists(at("outside/file")));
}

TEST_F(PosixStore, RemoveAllTakesLinksAndLeavesWhatTheyLeadTo) {
  fs::create_directory_symlink("../outside", at("inside/link"));
  fs::create_directory_symlink("outside", at("link"));
  store_->remove_all(at("inside"));
  store_->remove_all(at("link/"));
  EXPECT_FALSE(store_->exists(at("inside")));
  EXPECT_FALSE(store_->exists(at("link")));
  EXPECT_EQ(get(*store_, at("outside/file")), "outside");
}

TEST_F(PosixStore, ALinkThatLeadsNowhereTakesItsName) {
  fs::create_symlink("nothing", at("link"));
  EXPECT_TRUE(store_->exists(at("link")));
  EXPECT_FALSE(store_->is_folder(at("link")));
  EXPECT_EQ(store_->list(temp_.path()).size(), 3u);
  expect_error(ErrorKind::kIo, {at("link"), "exists"}, [&] { store_->create(at("link")); });
  expect_error(ErrorKind::kIo, {at("link"), "exists"}, [&] { store_->rename(at("inside"), at("link")); });
}

TEST_F(PosixStore, PathsWithANulByteAreRefused) {
  const fs::path path(std::string("inside\0x", 8));
  expect_error(ErrorKind::kInvalidArgument, {"NUL"}, [&] { store_->open(path); });
  expect_error(ErrorKind::kInvalidArgument, {"NUL"}, [&] { store_->remove_all(at("") / path); });
}

/// Makes openat2, renameat2 and copy_file_range fail from here on, as under an old kernel or in a strict
/// container.
bool forbid_new_system_calls() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat2, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat2, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_copy_file_range, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(filter), filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST_F(PosixStore, WorksWithoutNewSystemCalls) {
  fs::create_symlink("../outside/file", at("inside/out"));
  const auto in_a_child = [&] {
    if (!forbid_new_system_calls()) ::_exit(2);
    EXPECT_EQ(open_inside(at("inside"), "sub/file"), "sub");
    EXPECT_EQ(open_inside(at("inside"), "out"), "leads out");
    store_->rename(at("inside/file"), at("inside/renamed"));
    EXPECT_EQ(get(*store_, at("inside/renamed")), "inside");
    expect_error(ErrorKind::kIo, {at("outside/file"), "exists"},
                 [&] { store_->rename(at("inside/renamed"), at("outside/file")); });
    expect_error(ErrorKind::kIo, {at("inside/sub"), "Invalid argument"},
                 [&] { store_->rename(at("inside"), at("inside/sub/x")); });
    expect_error(ErrorKind::kUnsupported, {at("inside"), at("outside"), "one step"},
                 [&] { store_->exchange(at("inside"), at("outside")); });
    store_->create(at("copy"))->copy_from(*store_->open(at("outside/file")), 0, 0, 7);
    EXPECT_EQ(get(*store_, at("copy")), "outside");
    ::_exit(HasFailure() ? 1 : 0);
  };
  EXPECT_EXIT(in_a_child(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace spolia
