// OpenAI's Agents SDK: an agent with a tool, over both of its APIs.
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from '@openai/agents'
import OpenAI from 'openai'
import { z } from 'zod'
import { BASE, MODEL, STEPS, assert, check } from './shared.mjs'

setTracingDisabled(true)
const client = new OpenAI({ baseURL: `${BASE}/v1`, apiKey: 'any', maxRetries: 0 })
const models = { responses: new OpenAIResponsesModel(client, MODEL), chat: new OpenAIChatCompletionsModel(client, MODEL) }
for (const [api, model] of Object.entries(models)) {
  for (const stream of [true, false]) {
    await check(api, `an agent with a tool${stream ? ', streamed' : ''}`, async () => {
      const seen = []
      const look = tool({ name: 'look', description: 'd', parameters: z.object({ q: z.string() }), execute: async ({ q }) => { seen.push(q); return '42' } })
      const result = await run(new Agent({ name: 'a', model, tools: [look] }), STEPS, { stream })
      if (stream) await result.completed
      assert.deepEqual([result.finalOutput, seen], ['It is 42.', ['a"b']])
    })
  }
}
