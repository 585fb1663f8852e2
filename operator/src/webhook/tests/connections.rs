//! Clients that are slow, silent or too many; changed certificates; shutdown.

use super::*;
use std::time::Instant;

#[tokio::test]
async fn a_client_that_stalls_in_its_body_is_disconnected_and_does_not_block_others() {
    let limits = Limits {
        body_pause_max: Duration::from_millis(300),
        ..Limits::default()
    };
    let rig = start(Labels::default(), limits, Bounds::default()).await;
    let mut slow = rig.connect().await;
    slow.write_all(head(INJECT, 1000).as_bytes()).await.unwrap();
    slow.write_all(b"{\"request\":").await.unwrap();
    rig.review(INJECT, &review(pod())).await;
    let (status, _, _) = answer(&mut slow).await.unwrap();
    assert_eq!(status, 408);
    assert!(rig.counted(r#"webhook_unreadable_total{reason="too_slow"} 1"#));
    // The rest of that body could be taken for another request, so the connection is closed.
    assert_eq!(slow.read(&mut [0; 8]).await.unwrap_or(0), 0);
}

#[tokio::test]
async fn an_announced_body_reserves_no_memory() {
    let limits = Limits {
        bodies_bytes_max: 4 << 20,
        body_time_max: Duration::from_secs(60),
        body_pause_max: Duration::from_secs(60),
        ..Limits::default()
    };
    let bounds = Bounds {
        request_time_max: Duration::from_secs(60),
        ..Bounds::default()
    };
    let rig = start(Labels::default(), limits, bounds).await;
    let mut greedy = Vec::new();
    for _ in 0..10 {
        let mut stream = rig.connect().await;
        let head = head(INJECT, 4 << 20) + "{";
        stream.write_all(head.as_bytes()).await.unwrap();
        greedy.push(stream);
    }
    let review = review(pod());
    let answered = tokio::time::timeout(Duration::from_secs(20), rig.review(INJECT, &review));
    assert!(
        answered.await.is_ok(),
        "a review waits for what never comes"
    );
}

#[tokio::test]
async fn a_received_body_holds_memory_until_its_client_times_out() {
    let limits = Limits {
        bodies_bytes_max: 256 << 10,
        body_bytes_max: 256 << 10,
        body_time_max: Duration::from_secs(60),
        body_pause_max: Duration::from_millis(300),
        ..Limits::default()
    };
    let rig = start(Labels::default(), limits, Bounds::default()).await;
    let mut stopped = rig.connect().await;
    let most = head(INJECT, 256 << 10) + &" ".repeat((256 << 10) - 1);
    stopped.write_all(most.as_bytes()).await.unwrap();
    let began = Instant::now();
    rig.review(INJECT, &review(pod())).await;
    assert!(began.elapsed() < Duration::from_secs(20));
    let (status, _, body) = answer(&mut stopped).await.unwrap();
    assert_eq!(status, 408);
    assert!(
        String::from_utf8(body)
            .unwrap()
            .contains("next part of the request body")
    );
}

#[tokio::test]
async fn a_client_without_a_tls_handshake_is_disconnected() {
    let bounds = Bounds {
        handshake_time_max: Duration::from_millis(100),
        ..Bounds::default()
    };
    let rig = start(Labels::default(), Limits::default(), bounds).await;
    let mut silent = TcpStream::connect(rig.address).await.unwrap();
    assert_eq!(silent.read(&mut [0; 8]).await.unwrap_or(0), 0);
    rig.until(r#"http_connections_ended_total{port="webhook",reason="handshake"} 1"#)
        .await;
}

#[tokio::test]
async fn an_excess_connection_displaces_an_unused_one_first() {
    let bounds = Bounds {
        connections_max: 3,
        ..Bounds::default()
    };
    let rig = start(Labels::default(), Limits::default(), bounds).await;
    let body = review(pod()).to_string();
    let mut honest = rig.connect().await;
    let ask = head(INJECT, body.len()) + &body;
    honest.write_all(ask.as_bytes()).await.unwrap();
    answer(&mut honest).await.unwrap();
    let mut idle = Vec::new();
    for _ in 0..10 {
        idle.push(rig.connect().await);
    }
    honest.write_all(ask.as_bytes()).await.unwrap();
    assert_eq!(answer(&mut honest).await.unwrap().0, 200);
    assert_eq!(idle[0].read(&mut [0; 8]).await.unwrap_or(0), 0);
    rig.until(r#"http_connections_ended_total{port="webhook",reason="displaced"} 8"#)
        .await;
}

#[tokio::test]
async fn an_excess_connection_is_refused_while_all_others_are_active() {
    let bounds = Bounds {
        connections_max: 1,
        ..Bounds::default()
    };
    let decide = Labels::default();
    let rig = start(decide.clone(), Limits::default(), bounds).await;
    let mut slow = pod();
    slow["metadata"]["annotations"] = json!({"wait": 500});
    let body = review(slow).to_string();
    let mut busy = rig.connect().await;
    busy.write_all((head(INJECT, body.len()) + &body).as_bytes())
        .await
        .unwrap();
    asked(&decide).await;
    assert!(
        connect(rig.address, std::slice::from_ref(&rig.trusted))
            .await
            .is_err()
    );
    rig.until(r#"http_connections_ended_total{port="webhook",reason="full"} 1"#)
        .await;
    assert_eq!(answer(&mut busy).await.unwrap().0, 200);
}

#[tokio::test]
async fn changing_certificates_under_load_fails_no_call() {
    let rig = labels().await;
    let others: Vec<_> = (0..8).map(|_| certificate()).collect();
    let trusted: Vec<_> = others
        .iter()
        .map(|(der, _)| der.clone())
        .chain([rig.trusted.clone()])
        .collect();
    let body = review(pod()).to_string();
    let calls = (0..4).map(|_| {
        let (trusted, body, address) = (trusted.clone(), body.clone(), rig.address);
        tokio::spawn(async move {
            for _ in 0..20 {
                let mut stream = connect(address, &trusted).await.unwrap();
                for _ in 0..3 {
                    stream
                        .write_all((head(INJECT, body.len()) + &body).as_bytes())
                        .await
                        .unwrap();
                    assert_eq!(answer(&mut stream).await.unwrap().0, 200);
                }
            }
        })
    });
    let calls: Vec<_> = calls.collect();
    let mut changes = 0;
    while calls.iter().any(|call| !call.is_finished()) {
        rig.served.set(others[changes % others.len()].1.clone());
        changes += 1;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for call in calls {
        call.await.unwrap();
    }
    assert!(changes > 1);
}

#[tokio::test]
async fn a_leaving_server_answers_and_closes_connections() {
    let rig = labels().await;
    let body = review(pod()).to_string();
    let ask = head(INJECT, body.len()) + &body;
    let mut kept = rig.connect().await;
    kept.write_all(ask.as_bytes()).await.unwrap();
    assert!(
        !answer(&mut kept)
            .await
            .unwrap()
            .1
            .contains("connection: close")
    );
    rig.phase.send_replace(Phase::Leaving);
    kept.write_all(ask.as_bytes()).await.unwrap();
    let (status, head, _) = answer(&mut kept).await.unwrap();
    assert_eq!(status, 200);
    assert!(head.contains("connection: close"), "{head}");
    rig.review(INJECT, &review(pod())).await;
}

#[tokio::test]
async fn a_stopping_server_finishes_the_running_request_only() {
    let decide = Labels::default();
    let rig = start(decide.clone(), Limits::default(), Bounds::default()).await;
    let mut slow = pod();
    slow["metadata"]["annotations"] = json!({"wait": 300});
    let body = review(slow).to_string();
    let mut running = rig.connect().await;
    let idle = rig.connect().await;
    running
        .write_all((head(INJECT, body.len()) + &body).as_bytes())
        .await
        .unwrap();
    asked(&decide).await;
    rig.phase.send_replace(Phase::Stopping);
    assert_eq!(answer(&mut running).await.unwrap().0, 200);
    let began = Instant::now();
    rig.server.await.unwrap();
    assert!(
        began.elapsed() < Duration::from_secs(4),
        "an idle connection held up the end"
    );
    assert!(TcpStream::connect(rig.address).await.is_err());
    drop(idle);
}
