//! An object of any size, with the bytes of its sections.

use kvcachepool_protocol::key::*;
use kvcachepool_protocol::object::*;

pub fn object(sections: usize, hashes: usize, ids: bool) -> (Object, Vec<Vec<u8>>) {
    let payload: Vec<Vec<u8>> = (0..sections)
        .map(|i| vec![i as u8 + 1; 5000 + 1000 * i])
        .collect();
    let last_hash = EngineHash([9; 32]);
    let mut block_hashes: Vec<_> = (0..hashes).map(|i| EngineHash([i as u8; 32])).collect();
    if let Some(last) = block_hashes.last_mut() {
        *last = last_hash;
    }
    let object = Object {
        kind: KeyKind::Prefix,
        codec: Codec::None,
        fidelity: Fidelity::Exact,
        form: Form::default(),
        cipher: Cipher::None,
        model: ModelId([1; 32]),
        layout: LayoutId([2; 32]),
        namespace: NamespaceId([0; 32]),
        last_hash,
        parent: ChunkKey([4; 32]),
        part: 0,
        parts: 1,
        tokens: 256,
        first_token: 512,
        created_unix_ms: 1_790_000_000_000,
        expires_unix_s: 0,
        writer: [5; 16],
        engine: "vllm".into(),
        engine_version: "0.32.0".into(),
        nonce: [0; 24],
        sections: payload
            .iter()
            .zip(0..)
            .map(|(b, i)| Section::exact(i / 2, i % 2, b))
            .collect(),
        block_hashes,
        token_ids: if ids { (0..256).collect() } else { vec![] },
    };
    (object, payload)
}
