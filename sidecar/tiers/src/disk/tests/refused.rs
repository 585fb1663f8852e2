//! System calls that fail, by a filter that the kernel asks. It stays with the process until it ends.
#![allow(unsafe_code)]

/// Values of an argument.
#[derive(Debug, Clone, Copy)]
pub enum Of {
    This(u32),
    AllBut(u32),
}

/// From now on the call fails with `errno`, in all threads, where its argument, counted from 0, is one of these. False: the machine does
/// not let us.
pub fn refuse(call: libc::c_long, argument: u32, of: Of, errno: libc::c_int) -> bool {
    let step = |code: u32, no: u8, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: no,
        k,
    };
    // Offsets in `seccomp_data`: the call's number, and the lower half of an argument.
    let load = |offset| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, offset);
    let equal = |value, no| step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, no, value);
    let answer = |value| step(libc::BPF_RET | libc::BPF_K, 0, value);
    let half = u32::from(cfg!(target_endian = "big"));
    let (error, allow) = (
        libc::SECCOMP_RET_ERRNO | errno as u32,
        libc::SECCOMP_RET_ALLOW,
    );
    let (value, same, other) = match of {
        Of::This(value) => (value, error, allow),
        Of::AllBut(value) => (value, allow, error),
    };
    let mut filter = [
        load(0),
        equal(call as u32, 4),
        load(16 + 8 * argument + 4 * half),
        equal(value, 1),
        answer(same),
        answer(other),
        answer(allow),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: numbers only; it takes rights away from a process that a test made for that.
    let bare = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    let mode = libc::SECCOMP_SET_MODE_FILTER;
    let flags = libc::SECCOMP_FILTER_FLAG_TSYNC;
    // SAFETY: `program` points to `filter`, which lives until the call is over; the kernel copies it and checks it.
    let rc = unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program) };
    bare == 0 && rc == 0
}
