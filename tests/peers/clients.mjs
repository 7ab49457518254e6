// Drives a running server with npm's clients: `node clients.mjs URL openai|ai|anthropic|promptfoo`, from a folder that has them installed.
// As in clients.py: one line for each call, and answers are judged by their form alone.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [url, client] = process.argv.slice(2);
const here = createRequire(pathToFileURL(`${process.cwd()}/`));
const load = (name) => import(pathToFileURL(here.resolve(name)).href);
const version = (name) => JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8")).version;
const { z } = await load("zod");
const report = z.object({ city: z.enum(["Rome", "Oslo"]), warm: z.boolean() });
const messages = [{ role: "user", content: "Hello" }];
const base = { model: "tiny", messages, max_tokens: 60 };
const parameters = {
  type: "object",
  properties: { city: { enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", parameters } }];

function expect(truth, what) {
  if (!truth) throw new Error(what);
}

async function raises(call, status) {
  try {
    await call();
  } catch (error) {
    expect((error.status ?? error.statusCode) === status, `${error}`);
    return;
  }
  throw new Error("no error was raised");
}

async function gather(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

async function openaiCalls() {
  const { default: OpenAI } = await load("openai");
  const { zodResponseFormat } = await load("openai/helpers/zod");
  const made = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
  const chats = made.chat.completions;
  const format = zodResponseFormat(report, "report");
  return {
    models: async () => expect((await made.models.list()).data[0].id === "tiny", "another model"),
    completion: async () =>
      expect((await made.completions.create({ model: "tiny", prompt: "def f(", max_tokens: 8 })).choices.length, "none"),
    "completion stream": async () =>
      expect((await gather(await made.completions.create({ model: "tiny", prompt: "a", stream: true }))).length, "none"),
    chat: async () => expect((await chats.create(base)).usage.completion_tokens, "no usage"),
    "chat stream with usage": async () => {
      const stream = await chats.create({ ...base, stream: true, stream_options: { include_usage: true } });
      expect((await gather(stream)).at(-1).usage.completion_tokens, "no usage");
    },
    "chat, stream helper": async () =>
      expect(typeof (await chats.stream(base).finalContent()) === "string", "no content"),
    "chat logprobs": async () =>
      expect((await chats.create({ ...base, logprobs: true, top_logprobs: 2 })).choices[0].logprobs.content, "none"),
    "tools, forced": async () => {
      const answer = await chats.create({ ...base, tools, tool_choice: "required" });
      expect(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments).city, "no call");
    },
    "tools, runTools": async () => {
      let asked = 0;
      const run = (argument) => ((asked += 1), `20 C in ${argument.city}`);
      const tool = { type: "function", function: { name: "weather", parameters, parse: JSON.parse, function: run } };
      await chats
        .runTools({ ...base, tools: [tool], tool_choice: { type: "function", function: { name: "weather" } } })
        .done();
      expect(asked === 1, `asked ${asked} times`);
    },
    "JSON schema, zod parse": async () =>
      expect((await chats.parse({ ...base, response_format: format })).choices[0].message.parsed.city, "none"),
    "JSON schema, zod stream": async () => {
      const answer = await chats.stream({ ...base, response_format: format }).finalChatCompletion();
      expect(answer.choices[0].message.parsed.city, "none");
    },
    "error 400": () => raises(() => chats.create({ ...base, temperature: -1 }), 400),
    "error 404": () => raises(() => chats.create({ ...base, model: "no such" }), 404),
    responses: () => made.responses.create({ model: "tiny", input: "Hello" }),
  };
}

async function aiCalls() {
  const ai = await load("ai");
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  const { createOpenAI } = await load("@ai-sdk/openai");
  const compatible = createOpenAICompatible({
    name: "baton", baseURL: `${url}/v1`, apiKey: "unused", supportsStructuredOutputs: true, includeUsage: true,
  });
  const own = createOpenAI({ baseURL: `${url}/v1`, apiKey: "unused" });
  const asked = { prompt: "Hello", maxOutputTokens: 60, maxRetries: 0 };
  const weather = ai.tool({ inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }) });
  const output = ai.Output.object({ schema: report });
  const calls = (model) => ({
    text: async () => expect((await ai.generateText({ ...asked, model })).usage.outputTokens, "no usage"),
    stream: async () => {
      const answer = ai.streamText({ ...asked, model, onError() {} });
      await gather(answer.textStream);
      expect((await answer.usage).outputTokens, "no usage");
    },
    object: async () => expect((await ai.generateText({ ...asked, model, output })).output.city, "none"),
    "streamed object": async () => {
      const answer = ai.streamText({ ...asked, model, output, onError() {} });
      await gather(answer.partialOutputStream);
      expect((await answer.output).city, "none");
    },
    "tools, forced": async () => {
      const answer = await ai.generateText({ ...asked, model, tools: { weather }, toolChoice: "required" });
      expect(answer.toolCalls[0].input.city, "no call");
    },
    "tools, streamed": async () => {
      const answer = ai.streamText({ ...asked, model, tools: { weather }, toolChoice: "required", onError() {} });
      await answer.consumeStream();
      expect((await answer.toolCalls)[0].input.city, "no call");
    },
    "error 400": () => raises(() => ai.generateText({ ...asked, model, temperature: -1 }), 400),
  });
  const named = (name, found) => Object.fromEntries(Object.entries(found).map(([key, call]) => [`${name}, ${key}`, call]));
  return {
    ...named("openai-compatible", calls(compatible("tiny"))),
    "openai-compatible, completion": async () =>
      expect((await ai.generateText({ ...asked, model: compatible.completionModel("tiny") })).usage, "no usage"),
    ...named("openai.chat", calls(own.chat("tiny"))),
    ...named("openai.responses", calls(own.responses("tiny"))),
    "openai.responses, second turn with store: false": async () => {
      const options = { ...asked, model: own.responses("tiny"), providerOptions: { openai: { store: false } } };
      const first = (await ai.generateText(options)).response.messages;
      const more = [...messages, ...first, { role: "user", content: "Go on" }];
      expect((await ai.generateText({ ...options, prompt: undefined, messages: more })).usage.outputTokens, "no usage");
    },
  };
}

async function anthropicCalls() {
  const { default: Anthropic } = await load("@anthropic-ai/sdk");
  const { betaZodTool } = await load("@anthropic-ai/sdk/helpers/beta/zod");
  const made = new Anthropic({ baseURL: url, apiKey: "unused", maxRetries: 0 });
  return {
    messages: async () => expect((await made.messages.create(base)).usage.output_tokens, "no usage"),
    "stream helper": async () => expect((await made.messages.stream(base).finalMessage()).stop_reason, "no end"),
    "tools, toolRunner": async () => {
      let asked = 0;
      const run = () => ((asked += 1), "20 C");
      const weather = betaZodTool({ name: "weather", description: "", inputSchema: z.object({ city: z.enum(["Rome"]) }), run });
      const options = { tool_choice: { type: "any", disable_parallel_tool_use: true }, max_iterations: 2 };
      for await (const turn of made.beta.messages.toolRunner({ ...base, tools: [weather], ...options })) expect(turn, "none");
      expect(asked === 2, `asked ${asked} times`);
    },
    "error 400": () => raises(() => made.messages.create({ ...base, temperature: -1 }), 400),
    "error 404": () => raises(() => made.messages.create({ ...base, model: "no such" }), 404),
  };
}

async function promptfooCalls() {
  const { evaluate } = await load("promptfoo");
  const run = async (kind, more = {}) => {
    const provider = { id: `openai:${kind}:tiny`, config: { apiBaseUrl: `${url}/v1`, apiKey: "unused", ...more } };
    const ended = await evaluate({ prompts: ["Hello"], providers: [provider], tests: [{ vars: { a: "b" } }], writeLatestResults: false }, { cache: false });
    const [{ response, error }] = (await ended.toEvaluateSummary()).results;
    expect(!error && response.tokenUsage.completion, error ?? "no usage");
    return response.output;
  };
  return {
    "openai:chat": () => run("chat", { max_tokens: 60 }),
    "openai:completion": () => run("completion", { max_tokens: 60 }),
    "openai:responses": () => run("responses", { max_output_tokens: 60 }),
    "JSON schema": async () => {
      const schema = { name: "report", strict: true, schema: z.toJSONSchema(report) };
      report.parse(await run("chat", { max_tokens: 60, response_format: { type: "json_schema", json_schema: schema } }));
    },
  };
}

const made = { openai: openaiCalls, ai: aiCalls, anthropic: anthropicCalls, promptfoo: promptfooCalls };
const packages = {
  openai: ["openai"],
  ai: ["ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai"],
  anthropic: ["@anthropic-ai/sdk"],
  promptfoo: ["promptfoo"],
}[client];
console.log(packages.map((name) => `${name} ${version(name)}`).join(", "));
for (const [name, call] of Object.entries(await made[client]())) {
  try {
    await call();
    console.log(`  ${name}: works`);
  } catch (error) {
    console.log(`  ${name}: ${error.name}: ${`${error.message}`.slice(0, 400)}`);
  }
}
process.exit(0);
