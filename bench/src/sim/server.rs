//! The front of a simulated engine: the OpenAI API, health, and metrics under vLLM's names.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};

use super::cache::BLOCK_TOKENS;
use super::engine::{Engine, Event, Limits, token_text};
use super::fault::Fault;
use super::http::{Connection, Request};

/// The only model that is served.
pub const MODEL: &str = "sim";
/// How long a slow engine thinks about each token, in real time.
const SLOW: Duration = Duration::from_millis(200);
const JSON: &str = "application/json";
/// Answers are this long if nobody says otherwise. Tokens.
const DEFAULT_TOKENS: u64 = 16;

/// A running engine.
#[derive(Debug)]
pub struct Sim {
    state: Mutex<State>,
    work: Notify,
    /// Simulated seconds a real second.
    time_scale: f64,
}

#[derive(Debug)]
struct State {
    engine: Engine,
    clients: HashMap<u64, mpsc::UnboundedSender<Event>>,
    next_id: u64,
}

impl Sim {
    /// An idle engine; see [`Self::serve`].
    #[must_use]
    pub fn new(limits: Limits, time_scale: f64) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                engine: Engine::new(limits),
                clients: HashMap::new(),
                next_id: 0,
            }),
            work: Notify::new(),
            time_scale,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the engine.
    pub fn look<T>(&self, at: impl FnOnce(&Engine) -> T) -> T {
        at(&self.lock().engine)
    }

    /// Serves on `listener` until it is dropped.
    pub async fn serve(self: Arc<Self>, listener: StdListener) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        tokio::spawn(self.clone().run());
        loop {
            let (io, peer) = listener.accept().await?;
            io.set_nodelay(true)?;
            tokio::spawn(self.clone().connection(Connection::new(io), peer));
        }
    }

    /// Steps while there is work; what a step brought is told when its time is over.
    async fn run(self: Arc<Self>) {
        loop {
            let (took, events) = self.lock().engine.step();
            if took == Duration::ZERO {
                self.work.notified().await;
                continue;
            }
            tokio::time::sleep(took.div_f64(self.time_scale)).await;
            self.tell(events);
        }
    }

    fn tell(&self, events: Vec<(u64, Event)>) {
        let mut state = self.lock();
        for (id, event) in events {
            let told = state
                .clients
                .get(&id)
                .is_some_and(|to| to.send(event).is_ok());
            if matches!(event, Event::Token { last: true }) || !told {
                state.clients.remove(&id);
            }
            if !told {
                state.engine.abort(id);
            }
        }
    }

    async fn connection(self: Arc<Self>, mut connection: Connection, _peer: SocketAddr) {
        while let Ok(Some(request)) = connection.request().await {
            match self.answer(connection, request).await {
                Ok(Some(back)) => connection = back,
                Ok(None) | Err(_) => return,
            }
        }
    }

    /// Answers; the connection comes back if it can be used again.
    async fn answer(&self, mut to: Connection, request: Request) -> io::Result<Option<Connection>> {
        match (request.method.as_str(), request.path.as_str()) {
            ("GET", "/health") => to.answer("200 OK", "text/plain", "").await?,
            ("GET", "/v1/models") => {
                let models = json!({"object":"list","data":[{"id":MODEL,"object":"model"}]});
                to.answer("200 OK", JSON, &models.to_string()).await?;
            }
            ("GET", "/metrics") => {
                to.answer("200 OK", "text/plain; version=0.0.4", &self.metrics())
                    .await?;
            }
            ("POST", "/v1/chat/completions" | "/v1/completions") => {
                return self.generate(to, request).await;
            }
            _ => error(&mut to, "404 Not Found", "no such page").await?,
        }
        Ok(Some(to))
    }

    async fn generate(
        &self,
        mut to: Connection,
        request: Request,
    ) -> io::Result<Option<Connection>> {
        match request.fault {
            Some(Fault::Reset) => {
                to.reset();
                return Ok(None);
            }
            Some(Fault::Full) => {
                error(&mut to, "503 Service Unavailable", "queue full").await?;
                return Ok(Some(to));
            }
            _ => {}
        }
        let ask = match Ask::read(&request) {
            Ok(ask) => ask,
            Err(message) => {
                error(&mut to, "400 Bad Request", message).await?;
                return Ok(Some(to));
            }
        };
        let Some((id, events)) = self.submit(&ask) else {
            error(
                &mut to,
                "400 Bad Request",
                "the prompt is longer than the context",
            )
            .await?;
            return Ok(Some(to));
        };
        // Whichever way this ends, the engine must not go on for nobody.
        let _aborts = Aborts { sim: self, id };
        if ask.stream {
            stream(to, &ask, request.fault, events).await
        } else {
            plain(to, &ask, request.fault, events).await
        }
    }

    fn submit(&self, ask: &Ask) -> Option<(u64, mpsc::UnboundedReceiver<Event>)> {
        let mut state = self.lock();
        let id = state.next_id;
        state.next_id += 1;
        let prompt = ask.prompt.clone();
        if !state.engine.submit(id, prompt, ask.max_tokens) {
            return None;
        }
        let (sender, events) = mpsc::unbounded_channel();
        state.clients.insert(id, sender);
        self.work.notify_one();
        Some((id, events))
    }

    fn metrics(&self) -> String {
        let state = self.lock();
        let engine = &state.engine;
        let (running, waiting) = engine.queue();
        let totals = engine.totals;
        let label = format!("{{model_name=\"{MODEL}\"}}");
        let mut page = String::new();
        for (name, kind, value) in [
            ("num_requests_running", "gauge", running as f64),
            ("num_requests_waiting", "gauge", waiting as f64),
            ("kv_cache_usage_perc", "gauge", engine.cache_used()),
            (
                "prefix_cache_queries_total",
                "counter",
                totals.queried as f64,
            ),
            ("prefix_cache_hits_total", "counter", totals.hit as f64),
            ("prompt_tokens_total", "counter", totals.queried as f64),
            (
                "generation_tokens_total",
                "counter",
                totals.generated as f64,
            ),
            ("request_success_total", "counter", totals.finished as f64),
            ("request_aborted_total", "counter", totals.aborted as f64),
        ] {
            page += &format!("# TYPE vllm:{name} {kind}\nvllm:{name}{label} {value}\n");
        }
        page += &format!(
            "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{block_size=\"{BLOCK_TOKENS}\",num_gpu_blocks=\"{}\"}} 1\n",
            engine.cache_blocks()
        );
        page
    }
}

/// Tells the engine when a request's connection is done with it.
struct Aborts<'s> {
    sim: &'s Sim,
    id: u64,
}

impl Drop for Aborts<'_> {
    fn drop(&mut self) {
        let mut state = self.sim.lock();
        if state.clients.remove(&self.id).is_some() {
            state.engine.abort(self.id);
        }
    }
}

/// What a request asks for.
#[derive(Debug)]
struct Ask {
    prompt: Vec<u8>,
    max_tokens: usize,
    stream: bool,
    usage: bool,
    chat: bool,
}

impl Ask {
    fn read(request: &Request) -> Result<Self, &'static str> {
        let body: Value =
            serde_json::from_slice(&request.body).map_err(|_| "the body is no JSON")?;
        let chat = request.path.ends_with("chat/completions");
        let mut prompt = String::new();
        if chat {
            // The template: an answer stands in the next prompt exactly as it was made.
            for message in body["messages"].as_array().ok_or("messages is no list")? {
                let content = message["content"].as_str().ok_or("content is no text")?;
                let role = message["role"].as_str().ok_or("a message has no role")?;
                prompt += &format!("<{role}>\n{content}");
            }
            prompt += "<assistant>\n";
        } else {
            prompt += body["prompt"].as_str().ok_or("prompt is no text")?;
        }
        let limit = body["max_tokens"].as_u64().unwrap_or(DEFAULT_TOKENS);
        Ok(Self {
            prompt: prompt.into_bytes(),
            max_tokens: usize::try_from(limit).unwrap_or(usize::MAX).max(1),
            stream: body["stream"].as_bool().unwrap_or(false),
            usage: body["stream_options"]["include_usage"]
                .as_bool()
                .unwrap_or(false),
            chat,
        })
    }

    fn usage(&self, cached: usize, made: usize) -> Value {
        let prompt = super::cache::tokens(self.prompt.len());
        json!({
            "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    }

    fn object(&self, stream: bool, choice: Value) -> Value {
        let object = match (self.chat, stream) {
            (true, true) => "chat.completion.chunk",
            (true, false) => "chat.completion",
            (false, _) => "text_completion",
        };
        json!({"id": "sim-1", "object": object, "created": 0, "model": MODEL, "choices": [choice]})
    }
}

async fn error(to: &mut Connection, status: &str, message: &str) -> io::Result<()> {
    let kind = if status.starts_with('4') {
        "invalid_request_error"
    } else {
        "server_error"
    };
    let body = json!({"error": {"message": message, "type": kind, "param": null, "code": null}});
    to.answer(status, JSON, &body.to_string()).await
}

/// The next event, unless the client is gone first.
async fn next(to: &mut Connection, events: &mut mpsc::UnboundedReceiver<Event>) -> Option<Event> {
    tokio::select! {
        biased;
        event = events.recv() => event,
        () = to.gone() => None,
    }
}

async fn plain(
    mut to: Connection,
    ask: &Ask,
    fault: Option<Fault>,
    mut events: mpsc::UnboundedReceiver<Event>,
) -> io::Result<Option<Connection>> {
    let (mut cached, mut made, mut text) = (0, 0, String::new());
    loop {
        match next(&mut to, &mut events).await {
            None => return Ok(None),
            Some(Event::Admitted { cached: n }) => cached = n,
            Some(Event::Token { last }) => {
                text += &token_text(made);
                made += 1;
                if last {
                    break;
                }
            }
        }
    }
    let mut choice = json!({"index": 0, "finish_reason": "length"});
    if ask.chat {
        choice["message"] = json!({"role": "assistant", "content": text});
    } else {
        choice["text"] = json!(text);
    }
    let mut object = ask.object(false, choice);
    object["usage"] = ask.usage(cached, made);
    to.answer("200 OK", JSON, &object.to_string()).await?;
    if fault == Some(Fault::Surplus) {
        to.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL")
            .await?;
    }
    Ok(Some(to))
}

async fn stream(
    mut to: Connection,
    ask: &Ask,
    fault: Option<Fault>,
    mut events: mpsc::UnboundedReceiver<Event>,
) -> io::Result<Option<Connection>> {
    // The head goes out before prefill ends, as engines do: time to first token is not time to head.
    let framing = match fault {
        Some(Fault::UntilClose) => "Connection: close\r\n",
        _ => "Transfer-Encoding: chunked\r\n",
    };
    to.send(
        format!("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{framing}\r\n").as_bytes(),
    )
    .await?;
    let (mut cached, mut made) = (0, 0);
    loop {
        match next(&mut to, &mut events).await {
            None => return Ok(None),
            Some(Event::Admitted { cached: n }) => cached = n,
            Some(Event::Token { last }) => {
                let text = token_text(made);
                made += 1;
                let mut choice = json!({"index": 0, "finish_reason": if last { json!("length") } else { Value::Null }});
                if ask.chat {
                    choice["delta"] = json!({"content": text});
                } else {
                    choice["text"] = json!(text);
                }
                send_event(&mut to, &ask.object(true, choice).to_string(), fault).await?;
                if fault == Some(Fault::Slow) {
                    tokio::time::sleep(SLOW).await;
                }
                if let Some(over) = break_off(fault, made) {
                    return over(to).await;
                }
                if last {
                    break;
                }
            }
        }
    }
    if ask.usage {
        let mut object = ask.object(true, Value::Null);
        object["choices"] = json!([]);
        object["usage"] = ask.usage(cached, made);
        send_event(&mut to, &object.to_string(), fault).await?;
    }
    send_event(&mut to, "[DONE]", fault).await?;
    match fault {
        Some(Fault::UntilClose) => return Ok(None),
        Some(Fault::Surplus) => to.send(b"0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n").await?,
        _ => to.send(b"0\r\n\r\n").await?,
    }
    Ok(Some(to))
}

async fn send_event(to: &mut Connection, data: &str, fault: Option<Fault>) -> io::Result<()> {
    let event = format!("data: {data}\n\n");
    if fault == Some(Fault::UntilClose) {
        return to.send(event.as_bytes()).await;
    }
    to.send_chunk(event.as_bytes()).await
}

type Ending = std::pin::Pin<Box<dyn Future<Output = io::Result<Option<Connection>>> + Send>>;

/// How the stream goes wrong after `made` events, if it does.
fn break_off(fault: Option<Fault>, made: usize) -> Option<fn(Connection) -> Ending> {
    match (fault?, made) {
        (Fault::Stall, 1) => Some(|mut to| {
            Box::pin(async move {
                to.gone().await;
                Ok(None)
            })
        }),
        (Fault::DieFin, 3) => Some(|_to| Box::pin(async { Ok(None) })),
        (Fault::DieRst, 3) => Some(|to| {
            Box::pin(async move {
                to.reset();
                Ok(None)
            })
        }),
        (Fault::BadChunk, 2) => Some(|mut to| {
            Box::pin(async move {
                to.send(b"0x5\r\nhello\r\n").await?;
                to.gone().await;
                Ok(None)
            })
        }),
        _ => None,
    }
}
