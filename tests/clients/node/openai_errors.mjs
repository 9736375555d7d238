/** What OpenAI's client says of an error. */
export const describe = (error) => ({
  status: error.status, code: error.code, type: error.type, param: error.param,
  message: error.error?.message ?? error.message,
});
