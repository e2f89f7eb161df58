// llama.cpp by its Node.js binding: one model, greedy completions in OpenAI's shape.
import http from "node:http";
import path from "node:path";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, port] = process.argv.slice(2);
const found = createRequire(path.join(folder, "package.json")).resolve("node-llama-cpp");
const { getLlama, LlamaCompletion } = await import(pathToFileURL(found).href);
const llama = await getLlama({ build: "never", gpu: false, skipDownload: true });
const model = await llama.loadModel({ modelPath: path.join(folder, "model.gguf") });
const context = await model.createContext({ contextSize: 512, threads: 1 });
const completion = new LlamaCompletion({ contextSequence: context.getSequence() });

async function complete(request) {
  let body = "";
  for await (const piece of request) body += piece;
  const { prompt, max_tokens } = JSON.parse(body);
  const options = { maxTokens: max_tokens, temperature: 0 };
  const text = await completion.generateCompletion(prompt, options);
  return { choices: [{ text, finish_reason: "length" }] };
}

http
  .createServer(async (request, response) => {
    const answer = request.method === "POST" ? await complete(request) : { ready: true };
    response.writeHead(200, { "content-type": "application/json" });
    response.end(JSON.stringify(answer));
  })
  .listen(Number(port), "127.0.0.1");
