// Runs the checks of one program: each prints a line that run.py reads.
import assert from 'node:assert/strict'

export const BASE = process.env.BASE_URL
export const MODEL = process.env.MODEL
export { assert }

export async function check(api, did, action) {
  let result = 'ok'
  try {
    await action()
  } catch (error) {
    result = String(error?.stack ?? error).slice(0, 600)
  }
  console.log('CHECK ' + JSON.stringify({ api, did, result }))
}

export const STEPS =
  'Find it. [[think I have to look. || say I look. || call look {"q": "a\\"b"}]] [[say It is 42.]]'
