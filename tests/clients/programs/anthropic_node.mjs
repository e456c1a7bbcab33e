// The @anthropic-ai/sdk package: its stream helper and its runner of tools.
import Anthropic from '@anthropic-ai/sdk'
import { betaTool } from '@anthropic-ai/sdk/helpers/beta/json-schema'
import { BASE, MODEL, STEPS, assert, check } from './shared.mjs'

const client = new Anthropic({ baseURL: BASE, apiKey: 'any', maxRetries: 0 })
const input_schema = { type: 'object', properties: { q: { type: 'string' } }, required: ['q'] }
const messages = [{ role: 'user', content: STEPS }]

await check('messages', 'stream helper, thinking and a call', async () => {
  const tools = [{ name: 'look', description: 'd', input_schema }]
  const message = await client.messages.stream({ model: MODEL, max_tokens: 999, messages, tools }).finalMessage()
  assert.deepEqual(message.content.map((block) => block.type), ['thinking', 'text', 'tool_use'])
  assert.deepEqual([message.content[2].input.q, message.stop_reason], ['a"b', 'tool_use'])
  const results = [{ type: 'tool_result', tool_use_id: message.content[2].id, content: '42' }]
  const turns = [...messages, { role: 'assistant', content: message.content }, { role: 'user', content: results }]
  const whole = await client.messages.create({ model: MODEL, max_tokens: 999, messages: turns, tools })
  assert.equal(whole.content[0].text, 'It is 42.')
})
await check('messages', 'runner of tools, streamed', async () => {
  const seen = []
  const look = betaTool({ name: 'look', description: 'd', inputSchema: input_schema, run: async (args) => { seen.push(args.q); return '42' } })
  const runner = client.beta.messages.toolRunner({ model: MODEL, max_tokens: 999, messages, tools: [look], stream: true })
  let last
  for await (const stream of runner) last = await stream.finalMessage()
  assert.deepEqual([last.content[0].text, seen], ['It is 42.', ['a"b']])
})
await check('messages', 'count of tokens, an image, a document', async () => {
  const image = { type: 'image', source: { type: 'base64', media_type: 'image/png', data: 'AAAA' } }
  const document = { type: 'document', source: { type: 'text', media_type: 'text/plain', data: 'a' } }
  const content = [{ type: 'text', text: '[[say Seen.]]' }, image, document]
  const body = { model: MODEL, messages: [{ role: 'user', content }] }
  const message = await client.messages.create({ ...body, max_tokens: 99 })
  assert.equal(message.content[0].text, 'Seen.')
  assert.equal((await client.messages.countTokens(body)).input_tokens, message.usage.input_tokens)
})
