"""An allow-list of the system calls that solutions need, for bubblewrap and for containers; a longer one for tasks.

Any other call returns ENOSYS, which programs take for an older kernel. Not allowed are: kernel interfaces that no
solution needs (keyrings, io_uring, BPF, tracing, namespaces, mounts, message queues, System V memory); calls whose
arguments a filter can't read (`clone3`; libraries then call `clone`); and locks by which one sandbox could block
another or the host through shared files (`flock`, leases, open file description locks). `fcntl` locks are allowed
because SQLite needs them: an exclusive one needs a writable file, and the shared files are read-only.
"""

import fcntl
import json
import socket
import tempfile
from errno import ENOSYS
from functools import cache
from typing import Any

from agentic_opd.core.errors import SandboxError

_ALLOWED = """
access alarm arch_prctl brk capget capset chdir chmod chown clock_getres clock_gettime clock_nanosleep close
close_range copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2
epoll_wait eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fallocate fchdir fchmod
fchmodat fchmodat2 fchown fchownat fdatasync fgetxattr flistxattr fork fremovexattr fsetxattr fstat fstatfs fsync
ftruncate futex futex_requeue futex_wait futex_waitv futex_wake futimesat get_mempolicy get_robust_list
get_thread_area getcpu getcwd getdents getdents64 getegid geteuid getgid getgroups getitimer getpgid getpgrp getpid
getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid gettid gettimeofday getuid getxattr ioctl
ioprio_get kill lchown lgetxattr link linkat listxattr llistxattr lremovexattr lseek lsetxattr lstat madvise
map_shadow_stack membarrier memfd_create mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap mprotect
mremap mseal msync munlock munlockall munmap nanosleep newfstatat open openat openat2 pause pidfd_open
pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll prctl pread64 preadv preadv2 prlimit64
pselect6 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv removexattr rename renameat renameat2
restart_syscall riscv_flush_icache riscv_hwprobe rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo
rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min
sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity
sched_setscheduler sched_yield select sendfile set_mempolicy set_robust_list set_thread_area set_tid_address setfsgid
setfsuid setgid setgroups setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setuid
setxattr sigaltstack signalfd signalfd4 splice stat statfs statx symlink symlinkat sync_file_range sysinfo tee tgkill
time timer_create timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime
timerfd_settime times tkill truncate umask uname unlink unlinkat utime utimensat utimes vfork wait4 waitid write
writev accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmmsg
sendmsg sendto setsockopt shutdown
"""

_ALLOWED_IN_TASKS = """
chroot flock inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel io_destroy io_getevents
io_pgetevents io_setup io_submit ioprio_set kcmp landlock_add_rule landlock_create_ruleset landlock_restrict_self mbind
mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd name_to_handle_at
process_madvise process_vm_readv process_vm_writev ptrace sched_setattr semctl semget semop semtimedop shmat shmctl
shmdt shmget sync syncfs ustat vmsplice
"""
"""Also allowed in containers of tasks, which install packages, run databases and debug programs: what acts inside of
their namespaces only. No namespaces, mounts, keyrings, BPF, io_uring or events of the kernel's there either."""

_SOCKETS = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
"""Inet sockets reach only the sandbox's empty network."""

_NEW_NAMESPACES = 0x7E02_0000
"""The flags of clone(2) for new namespaces: cgroup, IPC, mount, network, process, user and UTS."""

_PERSONALITIES = (0, 0xFFFF_FFFF)
"""Linux's default, and the query of the current one."""

_FCNTL = (
    *(fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL),
    *(fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW, fcntl.F_GETOWN, fcntl.F_SETOWN, fcntl.F_GETSIG, fcntl.F_SETSIG),
    *(1032, 1033, 1034),  # F_GETPIPE_SZ, F_ADD_SEALS, F_GET_SEALS
)
"""No leases, no open file description locks, and no larger pipes, which are limited per user."""

_BY_ARGUMENT = (
    ("fcntl", 1, _FCNTL),
    ("personality", 0, _PERSONALITIES),
    ("socket", 0, _SOCKETS),
    ("socketpair", 0, (socket.AF_UNIX,)),
)
"""Call, number of an argument, and the values of it that are allowed."""


_BY_ARGUMENT_IN_TASKS = (
    # Also without random addresses, and as an older or 32-bit kernel: for debuggers and build tools.
    ("personality", 0, (*_PERSONALITIES, 0x8, 0x2_0000, 0x2_0008, 0x4_0000)),
    # The netlink sockets of a container concern its own network.
    ("socket", 0, (*_SOCKETS, socket.AF_NETLINK)),
    ("socketpair", 0, (socket.AF_UNIX,)),
)


@cache
def syscall_filter() -> bytes:
    """Return the filter as the kernel reads it (BPF).

    Raises:
        SandboxError: libseccomp is not installed.
    """
    try:
        from pyseccomp import ALLOW, EQ, ERRNO, MASKED_EQ, Arg, SyscallFilter
    except (ImportError, RuntimeError) as missing:
        raise SandboxError(
            f"the sandbox's filter of system calls can't be made: {missing}. Install libseccomp 2 with the system's "
            "package manager, for example `apt-get install libseccomp2`, and `pip install pyseccomp`."
        ) from missing
    built = SyscallFilter(ERRNO(ENOSYS))
    for name in _ALLOWED.split():
        try:
            built.add_rule(ALLOW, name)
        except (OSError, ValueError):
            continue  # This libseccomp does not know the call, so it remains forbidden.
    built.add_rule(ALLOW, "clone", Arg(0, MASKED_EQ, _NEW_NAMESPACES, 0))
    for name, argument, values in _BY_ARGUMENT:
        for value in values:
            built.add_rule(ALLOW, name, Arg(argument, EQ, value))
    with tempfile.TemporaryFile() as file:
        built.export_bpf(file)
        file.seek(0)
        return file.read()


def container_profile(*, is_task: bool = False) -> str:
    """Return the same filter, or that for tasks, as container engines read it (JSON)."""
    names = [*_ALLOWED.split(), *(("fcntl", *_ALLOWED_IN_TASKS.split()) if is_task else ())]
    by_argument = _BY_ARGUMENT_IN_TASKS if is_task else _BY_ARGUMENT

    def rule(name: str, argument: int, op: str, value: int, second: int = 0) -> dict[str, Any]:
        arguments = [{"index": argument, "value": value, "valueTwo": second, "op": f"SCMP_CMP_{op}"}]
        return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": arguments}

    rules = [
        {"names": names, "action": "SCMP_ACT_ALLOW"},
        rule("clone", 0, "MASKED_EQ", _NEW_NAMESPACES),
        *(rule(name, argument, "EQ", value) for name, argument, values in by_argument for value in values),
    ]
    return json.dumps({"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": ENOSYS, "syscalls": rules})
