// Vercel's AI SDK, with each of its providers that speaks one of the APIs: a loop of calls, twice.
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { createOpenResponses } from '@ai-sdk/open-responses'
import { generateText, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'
import { BASE, MODEL, STEPS, assert, check } from './shared.mjs'

const openai = createOpenAI({ baseURL: `${BASE}/v1`, apiKey: 'any' })
const models = {
  chat: ['@ai-sdk/openai chat', openai.chat(MODEL)],
  completions: ['@ai-sdk/openai completion', openai.completion(MODEL)],
  responses: ['@ai-sdk/openai responses, its default', openai(MODEL)],
  'responses ': ['@ai-sdk/open-responses', createOpenResponses({ name: 'a', url: `${BASE}/v1/responses`, apiKey: 'any' })(MODEL)],
  messages: ['@ai-sdk/anthropic', createAnthropic({ baseURL: `${BASE}/v1`, apiKey: 'any' })(MODEL)],
  'chat ': ['@ai-sdk/openai-compatible', createOpenAICompatible({ name: 'a', baseURL: `${BASE}/v1` })(MODEL)],
}
for (const [api, [name, model]] of Object.entries(models)) {
  if (api === 'completions') {
    await check(api, name, async () => {
      assert.match((await generateText({ model, prompt: 'x', maxRetries: 0 })).text, /not told/)
    })
    continue
  }
  for (const streamed of [true, false]) {
    await check(api, `${name}: loops of calls${streamed ? ', streamed' : ''}`, async () => {
      const seen = []
      const look = tool({ description: 'd', inputSchema: z.object({ q: z.string() }), execute: async ({ q }) => { seen.push(q); return '42' } })
      const messages = []
      for (const turn of [1, 2]) {
        messages.push({ role: 'user', content: STEPS })
        const options = { model, messages, tools: { look }, stopWhen: stepCountIs(4), maxRetries: 0, onError: ({ error }) => { throw error } }
        const result = streamed ? streamText(options) : await generateText(options)
        if (streamed) await result.consumeStream()
        assert.equal(await result.text, 'It is 42.')
        messages.push(...(await result.response).messages)
      }
      assert.deepEqual(seen, ['a"b', 'a"b'])
    })
  }
}
