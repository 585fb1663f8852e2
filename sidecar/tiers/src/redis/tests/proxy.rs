//! A way to a server that can be cut or held up at any byte.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, oneshot};

/// Takes connections and passes bytes on, for as long as there are any left that may pass.
pub struct Proxy {
    port: u16,
    rules: Arc<Rules>,
}

struct Rules {
    /// Bytes that may go to the server; the first one more ends the connection in both directions.
    up: AtomicUsize,
    /// The same, from the server.
    down: AtomicUsize,
    hold: Mutex<Option<Hold>>,
}

/// What stops everything once, before these bytes go to the server.
struct Hold {
    before: &'static [u8],
    reached: oneshot::Sender<()>,
    go_on: oneshot::Receiver<()>,
}

/// A connection that will be held up.
pub struct Held {
    reached: oneshot::Receiver<()>,
    go_on: oneshot::Sender<()>,
}

impl Held {
    /// Waits until it is.
    pub async fn reached(&mut self) {
        (&mut self.reached).await.unwrap();
    }

    /// Lets it go on.
    pub fn go_on(self) {
        self.go_on.send(()).unwrap();
    }
}

impl Proxy {
    /// In front of the server at this port.
    pub async fn start(to: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let rules = Arc::new(Rules {
            up: AtomicUsize::new(usize::MAX),
            down: AtomicUsize::new(usize::MAX),
            hold: Mutex::default(),
        });
        let all = rules.clone();
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let far = TcpStream::connect((Ipv4Addr::LOCALHOST, to)).await;
                tokio::spawn(pass(near, far.unwrap(), all.clone()));
            }
        });
        Self { port, rules }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// From now on so many bytes go to the server.
    pub fn cut_up(&self, after: usize) {
        self.rules.up.store(after, SeqCst);
    }

    /// From now on so many bytes come from the server.
    pub fn cut_down(&self, after: usize) {
        self.rules.down.store(after, SeqCst);
    }

    /// Bytes that may still go to the server, and come from it.
    pub fn left(&self) -> (usize, usize) {
        let Rules { up, down, .. } = &*self.rules;
        (up.load(SeqCst), down.load(SeqCst))
    }

    /// Holds the next connection up that says this.
    pub async fn hold_before(&self, before: &'static [u8]) -> Held {
        let ((reach, reached), (go_on, goes_on)) = (oneshot::channel(), oneshot::channel());
        *self.rules.hold.lock().await = Some(Hold {
            before,
            reached: reach,
            go_on: goes_on,
        });
        Held { reached, go_on }
    }
}

async fn pass(mut near: TcpStream, mut far: TcpStream, rules: Arc<Rules>) {
    let (mut up, mut down) = (vec![0; 65_536], vec![0; 65_536]);
    loop {
        let (upwards, read) = tokio::select! {
            read = near.read(&mut up) => (true, read),
            read = far.read(&mut down) => (false, read),
        };
        let Ok(read @ 1..) = read else {
            return;
        };
        let (budget, bytes) = match upwards {
            true => (&rules.up, &up[..read]),
            false => (&rules.down, &down[..read]),
        };
        if upwards {
            let mut hold = rules.hold.lock().await;
            let says = |hold: &mut Hold| bytes.windows(hold.before.len()).any(|w| w == hold.before);
            if let Some(hold) = hold.take_if(says) {
                hold.reached.send(()).unwrap();
                hold.go_on.await.unwrap();
            }
        }
        let passes = read.min(budget.load(SeqCst));
        budget.fetch_sub(passes, SeqCst);
        let to = if upwards { &mut far } else { &mut near };
        if to.write_all(&bytes[..passes]).await.is_err() || passes < read {
            return;
        }
    }
}
