// A server for Node.js: what it wrote, and what it keeps in memory, since its start.
const crypto = require("crypto");
const fs = require("fs");
const http = require("http");

const NOTE = "/var/lib/nagara-test-note";
const kept = crypto.randomBytes(8).toString("hex");
fs.writeFileSync(NOTE, kept);
const answers = {
  "/": () => "ready",
  "/kept": () => kept,
  "/file": () => fs.readFileSync(NOTE, "utf8"),
};
http
  .createServer((request, response) => {
    const answer = answers[request.url];
    response.writeHead(answer ? 200 : 404);
    response.end(answer ? answer() : "");
  })
  .listen(Number(process.argv[2]), "127.0.0.1");
