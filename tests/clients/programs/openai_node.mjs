// The openai package: its stream helpers throw at an event or an order that they do not know.
import OpenAI from 'openai'
import { z } from 'zod'
import { zodResponseFormat } from 'openai/helpers/zod'
import { BASE, MODEL, STEPS, assert, check } from './shared.mjs'

const client = new OpenAI({ baseURL: `${BASE}/v1`, apiKey: 'any', maxRetries: 0 })
const parameters = { type: 'object', properties: { q: { type: 'string' } }, required: ['q'] }
const look = { type: 'function', name: 'look', description: 'd', parameters, strict: false }
const chatLook = { type: 'function', function: { name: 'look', description: 'd', parameters } }

await check('chat', 'stream helper, a call by runTools', async () => {
  const seen = []
  const run = client.chat.completions.runTools({
    model: MODEL,
    stream: true,
    messages: [{ role: 'user', content: STEPS }],
    tools: [{ ...chatLook, function: { ...chatLook.function, function: (args) => { seen.push(args.q); return '42' }, parse: JSON.parse } }],
  })
  assert.equal(await run.finalContent(), 'It is 42.')
  assert.deepEqual(seen, ['a"b'])
})
await check('chat', 'structured output by a zod schema', async () => {
  const form = zodResponseFormat(z.object({ a: z.number() }), 'form')
  const done = await client.chat.completions.parse({ model: MODEL, messages: [{ role: 'user', content: '[[say {"a": 1}]]' }], response_format: form })
  assert.equal(done.choices[0].message.parsed.a, 1)
})
await check('completions', 'stream', async () => {
  let text = ''
  for await (const chunk of await client.completions.create({ model: MODEL, prompt: 'x', stream: true, max_tokens: 50 })) text += chunk.choices[0].text
  assert.match(text, /not told/)
})
for (const stream of [true, false]) {
  const ask = async (body) => stream ? await client.responses.stream({ model: MODEL, ...body }).finalResponse() : await client.responses.create({ model: MODEL, ...body })
  await check('responses', stream ? 'stream helper, a loop of calls by previous_response_id' : 'the same, whole', async () => {
    const first = await ask({ input: STEPS, tools: [look] })
    assert.deepEqual(first.output.map((item) => item.type), ['reasoning', 'message', 'function_call'])
    assert.equal(JSON.parse(first.output[2].arguments).q, 'a"b')
    const result = { type: 'function_call_output', call_id: first.output[2].call_id, output: '42' }
    const second = await ask({ input: [result], tools: [look], previous_response_id: first.id })
    assert.equal(second.output_text, 'It is 42.')
    const again = await ask({ input: [{ role: 'user', content: STEPS }, ...first.output, result], tools: [look], store: false })
    assert.equal(again.output_text, 'It is 42.')
  })
}
await check('responses', 'retrieve, input items, delete', async () => {
  const made = await client.responses.create({ model: MODEL, input: '[[say Hi.]]' })
  assert.equal((await client.responses.retrieve(made.id)).output_text, 'Hi.')
  const items = await client.responses.inputItems.list(made.id)
  assert.equal(items.data[0].content[0].text, '[[say Hi.]]')
  await client.responses.delete(made.id)
  await assert.rejects(client.responses.retrieve(made.id), OpenAI.NotFoundError)
  await assert.rejects(client.responses.create({ model: MODEL, input: 'x', previous_response_id: made.id }), (error) => error.code === 'previous_response_not_found')
})
await check('responses', 'compact, and go on with the summary', async () => {
  const made = await client.responses.compact({ model: MODEL, input: [{ role: 'user', content: 'Tuesday.' }] })
  const next = await client.responses.create({ model: MODEL, input: [...made.output, { role: 'user', content: '[[say Yes.]]' }] })
  assert.equal(next.output_text, 'Yes.')
})
await check('responses', 'an image', async () => {
  const content = [{ type: 'input_text', text: '[[say Seen.]]' }, { type: 'input_image', image_url: 'data:image/png;base64,AAAA', detail: 'auto' }]
  assert.equal((await client.responses.create({ model: MODEL, input: [{ role: 'user', content }] })).output_text, 'Seen.')
})
