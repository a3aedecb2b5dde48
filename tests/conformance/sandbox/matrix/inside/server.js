// A server with a timer, state in memory, and a worker thread that counts in shared memory.
const http = require("http");
const { Worker, isMainThread, workerData, parentPort } = require("worker_threads");

if (!isMainThread) {
  const counter = new Int32Array(workerData);
  setInterval(() => Atomics.add(counter, 0, 1), 50);
  parentPort.on("message", (number) => parentPort.postMessage(`worked ${number}`));
} else {
  const shared = new SharedArrayBuffer(4);
  const counter = new Int32Array(shared);
  const worker = new Worker(__filename, { workerData: shared });
  const kept = new Map([["state", "kept"]]);
  let ticks = 0, asked = 0;
  setInterval(() => ticks++, 50);
  http.createServer((request, response) => {
    if (request.url === "/work") {
      worker.once("message", (text) => response.end(`${text}\n`));
      worker.postMessage(++asked);
    } else {
      response.end(`${ticks} ${Atomics.load(counter, 0)} ${kept.get("state")}\n`);
    }
  }).listen(3000, "127.0.0.1");
}
